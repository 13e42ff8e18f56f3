//! The trend of a value that fluctuates.

use crate::spread::Spread;

/// A line through points, by the method of Theil and Sen: a few odd points do not move it.
pub(crate) struct Trend {
    /// Median of the slopes between any two points.
    pub(crate) slope: f64,
    /// How far the points spread about the line: nine of ten lie within this.
    pub(crate) spread: f64,
}

impl Trend {
    pub(crate) fn of(points: &[(f64, f64)]) -> Self {
        let mut slopes = Vec::new();
        for (number, (x, y)) in points.iter().enumerate() {
            let later = points[number + 1..].iter().filter(|later| later.0 > *x);
            slopes.extend(later.map(|later| (later.1 - y) / (later.0 - x)));
        }
        let slope = Spread::of(slopes).median;
        let rest = Spread::of(points.iter().map(|(x, y)| y - slope * x).collect());
        Self {
            slope,
            spread: rest.at(0.95) - rest.at(0.05),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_despite_odd_points() {
        let mut points: Vec<_> = (0..60)
            .map(|x| (f64::from(x), 3.0 * f64::from(x)))
            .collect();
        let line = Trend::of(&points);
        assert!((line.slope - 3.0).abs() < 1e-9 && line.spread < 1e-9);
        points[7].1 = 1e6;
        assert!((Trend::of(&points).slope - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_saw_tooth_spreads_more_than_it_rises() {
        let tooth = |x: u32| (f64::from(x), f64::from(x % 20));
        let saw = Trend::of(&(0..60).map(tooth).collect::<Vec<_>>());
        assert!(saw.slope * 60.0 < saw.spread);
        let rising = |x: u32| (f64::from(x), f64::from(x % 20) + f64::from(x));
        let leak = Trend::of(&(0..60).map(rising).collect::<Vec<_>>());
        assert!(leak.slope * 60.0 > leak.spread);
        assert!(Trend::of(&[]).slope.is_nan());
    }
}
