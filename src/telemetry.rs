//! Logs and metrics. Metrics are named `chat_<noun>_<unit>` and counted where the event happens; their help texts are in
//! `telemetry/help.rs`.

mod help;

use help::{COUNTERS, GAUGES, HISTOGRAMS};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::io::{IsTerminal as _, stderr};
use tracing_subscriber::{
    Layer as _, filter::Targets, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

use crate::{
    config::{Log, LogFormat},
    gateway::{PICTURE_OUTCOMES, REFUSED_CONNECTS},
    protocol::CloseCode,
};

/// The buckets of durations in seconds, from a fast fsync to a slow database.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
const COMMANDS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0];

/// The counters with labels. They are counted from zero where their labels are known.
const LABELLED: &[&str] = &[
    "chat_connects_refused_total",
    "chat_consumer_events_total",
    "chat_pictures_total",
    "chat_push_total",
    "chat_requests_total",
    "chat_sessions_closed_total",
    "chat_store_requests_failed_total",
    "chat_store_rows_written_total",
    "chat_store_speculative_requests_total",
];

/// Starts the log on stderr. Only a terminal gets colours.
///
/// # Errors
/// A text if `log.filter` is invalid.
pub fn start_logs(log: &Log) -> Result<(), String> {
    let filter: Targets = log
        .filter
        .parse()
        .map_err(|_| "log.filter is invalid".to_owned())?;
    let lines = fmt::layer()
        .with_writer(stderr)
        // Its report of a line that could not be written panics if nobody reads stderr any more.
        .log_internal_errors(false)
        .with_ansi(stderr().is_terminal());
    let lines = match log.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(lines)
        .with(filter)
        .init();
    Ok(())
}

/// Starts the recorder of metrics. It must be called once, before anything is counted.
///
/// # Errors
/// A text if another recorder is installed.
pub fn start_metrics() -> Result<PrometheusHandle, String> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
        .and_then(|b| b.set_buckets_for_metric(Matcher::Suffix("_commands".into()), COMMANDS))
        .and_then(|b| b.set_buckets_for_metric(Matcher::Suffix("_rows".into()), COMMANDS))
        .and_then(|b| b.install_recorder())
        .map_err(|e| e.to_string())?;
    for &(name, help) in COUNTERS {
        describe_counter!(name, help);
    }
    for &(name, help) in GAUGES {
        describe_gauge!(name, help);
    }
    for &(name, help) in HISTOGRAMS {
        describe_histogram!(name, help);
    }
    count_from_zero();
    Ok(handle)
}

/// Makes the counters exist from the start. An alert on a counter that appears with its first event would miss that event.
fn count_from_zero() {
    for &(name, _) in COUNTERS {
        if !LABELLED.contains(&name) {
            counter!(name).increment(0);
        }
    }
    for code in CloseCode::ALL {
        counter!("chat_sessions_closed_total", "reason" => code.reason()).increment(0);
    }
    for outcome in PICTURE_OUTCOMES {
        counter!("chat_pictures_total", "outcome" => outcome).increment(0);
    }
    for reason in REFUSED_CONNECTS {
        counter!("chat_connects_refused_total", "reason" => reason).increment(0);
    }
}
