//! Histograms of latencies.

use hdrhistogram::Histogram;

/// Microseconds. A longer latency counts as this.
pub(crate) const LATENCY_US_MAX: u64 = 60_000_000;

/// A histogram of microseconds.
pub(crate) fn latencies() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(LATENCY_US_MAX, 3)?)
}

/// A quantile in milliseconds. NaN without values, because 0 would be the best of all.
pub(crate) fn quantile_ms(latency: &Histogram<u64>, quantile: f64) -> f64 {
    if latency.is_empty() {
        return f64::NAN;
    }
    latency.value_at_quantile(quantile) as f64 / 1000.0
}

/// Two quantiles in milliseconds.
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

impl Quantiles {
    pub(crate) fn of(latency: &Histogram<u64>) -> Self {
        let ms = |quantile| quantile_ms(latency, quantile);
        Self {
            p50: ms(0.5),
            p99: ms(0.99),
        }
    }
}
