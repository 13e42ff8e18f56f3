//! The help text of each metric, by kind and by the layer that counts it. A test checks that none is missing.

/// The name of a metric and its help text.
pub(super) type Help = (&'static str, &'static str);

pub(super) const COUNTERS: &[Help] = &[
    // store
    (
        "chat_store_driver_errors_total",
        "Requests of the driver that failed",
    ),
    (
        "chat_store_driver_requests_total",
        "Requests that the driver began",
    ),
    (
        "chat_store_driver_retries_total",
        "Requests that the driver sent to another node",
    ),
    (
        "chat_store_driver_timeouts_total",
        "Requests of the driver without an answer in time",
    ),
    (
        "chat_store_fsyncs_total",
        "Group commits of the embedded store",
    ),
    (
        "chat_store_requests_failed_total",
        "Requests to Cassandra whose outcome stayed unknown, by kind",
    ),
    (
        "chat_store_rows_written_total",
        "Rows (embedded: cells) written, by table",
    ),
    (
        "chat_store_schema_changes_total",
        "Statements that changed the schema",
    ),
    (
        "chat_store_speculative_requests_total",
        "Requests to a further node of Cassandra because one did not answer soon, by kind",
    ),
    // chat
    (
        "chat_conversations_evicted_total",
        "Conversations that left memory to make room for others",
    ),
    (
        "chat_changes_committed_total",
        "Edits, deletions and reactions that were acknowledged",
    ),
    (
        "chat_entries_committed_total",
        "Entries committed in all conversations",
    ),
    (
        "chat_history_entries_read_total",
        "Messages read from the store for pages and for clients that resume",
    ),
    ("chat_inbox_rows_written_total", "Inbox rows written"),
    (
        "chat_store_retries_total",
        "Store operations repeated because their outcome was unknown",
    ),
    (
        "chat_takeovers_total",
        "Conversations loaded from the store, after a failure or in ordinary use",
    ),
    // fanout
    (
        "chat_events_held_total",
        "Events that waited for the next pass over the sockets of a busy channel",
    ),
    (
        "chat_frames_queued_total",
        "Event frames queued for sockets",
    ),
    (
        "chat_frames_sent_total",
        "Frames written to sockets, events and replies",
    ),
    // cluster
    (
        "chat_cluster_retries_total",
        "Operations that waited for a change of the ring or of a link, to be tried again",
    ),
    (
        "chat_conversations_lost_total",
        "Conversations that left this gateway with work in progress",
    ),
    (
        "chat_conversations_repaired_total",
        "Conversations whose inbox rows were written again after the crash of a gateway",
    ),
    (
        "chat_operations_forwarded_total",
        "Requests that other gateways sent here",
    ),
    (
        "chat_overlays_turned_early_total",
        "Times that the recent publications of inboxes were dropped early to make room",
    ),
    (
        "chat_peer_asks_refused_total",
        "Requests of other gateways refused because too many were in progress",
    ),
    ("chat_peer_asks_total", "Requests sent to other gateways"),
    (
        "chat_peer_bytes_sent_total",
        "Bytes of the frames written to other gateways",
    ),
    (
        "chat_peer_connections_total",
        "Connections to other gateways established",
    ),
    (
        "chat_peer_frames_sent_total",
        "Frames written to other gateways",
    ),
    (
        "chat_peer_links_given_up_total",
        "Links to other gateways closed because too much waited in their queue",
    ),
    (
        "chat_peer_messages_too_long_total",
        "Messages to other gateways not sent because they do not fit into a frame",
    ),
    (
        "chat_peer_messages_unknown_total",
        "Messages of other gateways passed over because another version of the program sent them",
    ),
    (
        "chat_peer_refused_total",
        "Connections of gateways refused because they do not know the cluster's secret",
    ),
    (
        "chat_places_remembered_total",
        "Sessions that reconnected without a read of the store",
    ),
    (
        "chat_publications_held_total",
        "Publications that had to wait until other gateways adopted the new ring",
    ),
    (
        "chat_ring_raised_total",
        "Times that this gateway raised a ring that was older than what is stored",
    ),
    (
        "chat_ring_renewals_failed_total",
        "Attempts to renew the lease that failed",
    ),
    // consumers
    (
        "chat_consumer_events_total",
        "Events of a consumer, by result: delivered; failed, which is tried again; skipped after ten attempts",
    ),
    (
        "chat_push_total",
        "Notifications to devices, by provider and result",
    ),
    // gateway
    (
        "chat_connects_refused_total",
        "Connections refused before a session, by reason",
    ),
    (
        "chat_requests_total",
        "Requests answered, by type and result",
    ),
    (
        "chat_sessions_closed_total",
        "Client connections ended, by reason",
    ),
    ("chat_sessions_opened_total", "Client connections accepted"),
    // tasks
    (
        "chat_pictures_total",
        "Uploaded pictures by what became of them: shown, refused (above a limit, or broken), failed (their decoder needed \
         too much memory or time, or could not be started)",
    ),
    (
        "chat_files_blocked_total",
        "Uploaded files that the scanner did not let pass, and that were erased",
    ),
    (
        "chat_files_erased_total",
        "Uploaded files that were erased because no message had them",
    ),
    (
        "chat_files_left_to_sweep_total",
        "Dropped files that were left to a sweep because too many waited",
    ),
    (
        "chat_panics_total",
        "Tasks that panicked. Each is a bug, and is logged with its task",
    ),
];

pub(super) const GAUGES: &[Help] = &[
    (
        "chat_files_in_work",
        "Uploaded files that wait for work that takes long, or are worked on: picture (decoding), scan, hash (reading from a \
         bucket)",
    ),
    // store
    (
        "chat_store_damaged",
        "1 if files of the embedded store are damaged, and 0 otherwise",
    ),
    (
        "chat_store_driver_connections",
        "Connections to the nodes of the cluster",
    ),
    (
        "chat_store_journal_bytes",
        "Size of the embedded store's journals",
    ),
    (
        "chat_store_nodes",
        "Nodes of the cluster as seen from here, by state",
    ),
    // chat
    (
        "chat_conversations_open",
        "Conversations in memory, with an owner task each",
    ),
    (
        "chat_conversations_open_bytes",
        "Approximate size of the conversations in memory",
    ),
    (
        "chat_inbox_conversations_pending",
        "Conversations whose inbox rows waited for the last flush",
    ),
    (
        "chat_ranks_ahead_seconds",
        "Time by which the order of inboxes is ahead of this gateway's clock, as of the last flush: some clock was ahead",
    ),
    // cluster
    (
        "chat_cluster_level",
        "Level of the stored formats and peer messages that the ring uses",
    ),
    ("chat_peer_links", "Links to other gateways, by state"),
    (
        "chat_peer_queued_bytes",
        "Bytes of messages to other gateways that are not acknowledged yet",
    ),
    (
        "chat_peer_queued_messages",
        "Messages to other gateways that are not acknowledged yet",
    ),
    (
        "chat_publications_held",
        "Publications that wait here until the other gateways have adopted the new ring",
    ),
    (
        "chat_publications_in_hand",
        "Publications not yet acknowledged by the homes of all their users",
    ),
    (
        "chat_ring_lease_seconds",
        "Time for which this gateway may still act without reading the ring again",
    ),
    ("chat_ring_members", "Gateways in the ring"),
    (
        "chat_ring_version",
        "The ring version under which this gateway acts",
    ),
    ("chat_users_online", "Users with at least one session"),
    // consumers
    (
        "chat_consumer_lagging",
        "Open conversations of this gateway with something that a consumer has not got",
    ),
    (
        "chat_consumer_oldest_seconds",
        "Age of the oldest event of these",
    ),
    (
        "chat_push_waiting",
        "Messages for which it is not decided whether a user is notified",
    ),
    // gateway
    (
        "chat_downloads",
        "Files that clients download from this gateway now",
    ),
    ("chat_sessions", "Open client connections"),
    (
        "chat_sockets",
        "Open sockets of the client listener, HTTP and WebSocket",
    ),
    (
        "chat_sockets_unauthenticated",
        "Open sockets of the client listener that have not sent a valid token yet",
    ),
    ("chat_uploads", "Uploads that clients write to now"),
];

pub(super) const HISTOGRAMS: &[Help] = &[
    // store
    ("chat_store_batch_rows", "Rows of one write to Cassandra"),
    (
        "chat_store_group_commands",
        "Writes that shared one group commit",
    ),
    (
        "chat_store_request_seconds",
        "Requests to Cassandra with their retries, by kind",
    ),
    // gateway
    (
        "chat_send_seconds",
        "Time from a send request to its acknowledgement",
    ),
];
