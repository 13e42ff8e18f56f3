//! Logs and metrics. Metrics are named `chat_<noun>_<unit>` and counted where the event happens; their descriptions are
//! here.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// The buckets of durations in seconds, from a fast fsync to a slow database.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
const COMMANDS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0];

/// Starts the log on stderr.
///
/// # Errors
/// A text if `log.filter` is invalid.
pub fn start_logs(log: &Log) -> Result<(), String> {
    let filter = EnvFilter::try_new(&log.filter)
        .map_err(|e| format!("log.filter: {:?} is invalid: {e}", log.filter))?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match log.format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Starts the recorder of metrics. To be called once, before anything is counted.
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
    describe_gauge!("chat_sessions", "Open client connections");
    describe_gauge!(
        "chat_sockets",
        "Open sockets of the client listener, HTTP and WebSocket"
    );
    describe_gauge!(
        "chat_sockets_unauthenticated",
        "Open sockets of the client listener that have not sent a valid token yet"
    );
    describe_gauge!("chat_users_online", "Users with at least one session");
    describe_gauge!(
        "chat_conversations_open",
        "Conversations in memory, with an owner task each"
    );
    describe_gauge!(
        "chat_conversations_open_bytes",
        Unit::Bytes,
        "Approximate size of the conversations in memory"
    );
    describe_counter!(
        "chat_conversations_evicted_total",
        "Conversations that left memory to make room for others"
    );
    describe_counter!(
        "chat_history_entries_read_total",
        "Messages read from the store for pages and for clients that resume"
    );
    describe_counter!(
        "chat_overlays_turned_early_total",
        "Times that the recent publications of inboxes were dropped early to make room"
    );
    describe_gauge!(
        "chat_ring_version",
        "The ring version under which this gateway acts"
    );
    describe_gauge!(
        "chat_inbox_conversations_pending",
        "Conversations whose inbox rows waited for the last flush"
    );
    describe_gauge!(
        "chat_store_journal_bytes",
        Unit::Bytes,
        "Size of the embedded store's journals"
    );
    describe_counter!("chat_sessions_opened_total", "Client connections accepted");
    describe_counter!(
        "chat_sessions_closed_total",
        "Client connections ended, by reason"
    );
    describe_counter!(
        "chat_panics_total",
        "Tasks that panicked. Each is a bug, and is logged with its task"
    );
    describe_counter!(
        "chat_requests_total",
        "Requests answered, by type and result"
    );
    describe_counter!(
        "chat_entries_committed_total",
        "Entries committed in all conversations"
    );
    describe_counter!(
        "chat_events_held_total",
        "Events that waited to be coalesced with others of a busy channel"
    );
    describe_counter!(
        "chat_frames_queued_total",
        "Event frames queued for sockets"
    );
    describe_counter!(
        "chat_frames_sent_total",
        "Frames written to sockets, events and replies"
    );
    describe_counter!(
        "chat_store_rows_written_total",
        "Rows (embedded: cells) written, by table"
    );
    describe_histogram!(
        "chat_store_batch_rows",
        Unit::Count,
        "Rows of one write to Cassandra"
    );
    describe_histogram!(
        "chat_store_request_seconds",
        Unit::Seconds,
        "Requests to Cassandra with their retries, by kind"
    );
    describe_counter!(
        "chat_store_requests_failed_total",
        "Requests to Cassandra whose outcome stayed unknown, by kind"
    );
    describe_counter!(
        "chat_store_schema_changes_total",
        "Statements that changed the schema"
    );
    describe_counter!(
        "chat_store_driver_requests_total",
        "Requests that the driver began"
    );
    describe_counter!(
        "chat_store_driver_errors_total",
        "Requests of the driver that failed"
    );
    describe_counter!(
        "chat_store_driver_retries_total",
        "Requests that the driver sent to another node"
    );
    describe_counter!(
        "chat_store_driver_timeouts_total",
        "Requests of the driver without an answer in time"
    );
    describe_gauge!(
        "chat_store_driver_connections",
        "Connections to the nodes of the cluster"
    );
    describe_gauge!(
        "chat_store_nodes",
        "Nodes of the cluster as seen from here, by state"
    );
    describe_counter!("chat_inbox_rows_written_total", "Inbox rows written");
    describe_counter!(
        "chat_peer_asks_refused_total",
        "Requests of other gateways refused because too many were in progress"
    );
    describe_counter!(
        "chat_peer_links_given_up_total",
        "Links to other gateways closed because too much waited in their queue"
    );
    describe_counter!(
        "chat_peer_messages_too_long_total",
        "Messages to other gateways not sent because they do not fit into a frame"
    );
    describe_counter!(
        "chat_peer_messages_unknown_total",
        "Messages of other gateways passed over because another version of the program sent them"
    );
    describe_counter!(
        "chat_places_remembered_total",
        "Sessions that reconnected without a read of the store"
    );
    describe_counter!(
        "chat_store_fsyncs_total",
        "Group commits of the embedded store"
    );
    describe_counter!(
        "chat_store_retries_total",
        "Store operations repeated because their outcome was unknown"
    );
    describe_counter!(
        "chat_connects_refused_total",
        "Connections refused before a session, by reason"
    );
    describe_histogram!(
        "chat_store_group_commands",
        Unit::Count,
        "Writes that shared one group commit"
    );
    describe_histogram!(
        "chat_send_seconds",
        Unit::Seconds,
        "Time from a send request to its acknowledgement"
    );
    Ok(handle)
}
