//! The median and the spread of several measurements.

use crate::report::Report;

/// Values in order, and their median.
pub(crate) struct Spread {
    pub(crate) median: f64,
    values: Vec<f64>,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let mut spread = Self {
            median: f64::NAN,
            values,
        };
        spread.median = spread.at(0.5);
        spread
    }

    /// The ratios of pieces of two kinds that took turns.
    pub(crate) fn ratios(these: &[f64], others: &[f64]) -> Self {
        Self::of(these.iter().zip(others).map(|(a, b)| a / b).collect())
    }

    /// A quantile, interpolated between the two nearest values. NaN without values, or if one of them is.
    pub(crate) fn at(&self, quantile: f64) -> f64 {
        let Some(last) = self.values.len().checked_sub(1) else {
            return f64::NAN;
        };
        if self.values.iter().any(|value| value.is_nan()) {
            return f64::NAN;
        }
        let place = last as f64 * quantile;
        let (below, above) = (place.floor() as usize, place.ceil() as usize);
        let share = place - place.floor();
        self.values[below] * (1.0 - share) + self.values[above] * share
    }

    /// Reports the median, and prints the minimum and the maximum.
    pub(crate) fn tell(&self, report: &mut Report, name: &str, unit: &str) {
        report.figure(name, self.median, unit);
        self.tell_range(unit);
    }

    /// Prints the minimum and the maximum.
    pub(crate) fn tell_range(&self, unit: &str) {
        println!(
            "  {:<44} {:.2} to {:.2} {unit} in {} pieces",
            "",
            self.at(0.0),
            self.at(1.0),
            self.values.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        let spread = Spread::of(vec![4.0, 1.0, 2.0, 3.0]);
        let all = [0.0, 0.25, 0.5, 1.0].map(|quantile| spread.at(quantile));
        assert_eq!(all, [1.0, 1.75, 2.5, 4.0]);
        assert_eq!(spread.median, 2.5);
    }

    #[test]
    fn what_has_no_values_has_no_median() {
        assert!(Spread::of(Vec::new()).median.is_nan());
        assert!(Spread::of(vec![1.0, 2.0, f64::NAN]).median.is_nan());
        assert!(Spread::of(vec![-f64::NAN, 1.0, 2.0]).at(1.0).is_nan());
    }
}
