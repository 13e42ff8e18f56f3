//! Histograms of latencies.

use hdrhistogram::Histogram;

/// Microseconds. A longer latency counts as this.
pub(crate) const LATENCY_US_MAX: u64 = 60_000_000;

/// A histogram of microseconds.
pub(crate) fn latencies() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(LATENCY_US_MAX, 3)?)
}
