//! All limits that are not settings, each with its unit and its reason.

use std::time::Duration;

use super::Millis;

/// Bytes of a user id. It is part of keys and of every event.
pub const USER_ID_BYTES_MAX: usize = 64;

/// Entries of one conversation that are appended but not settled (committed, with their membership changes applied). A
/// takeover has at most this many uncertain entries to settle.
pub const APPENDS_IN_FLIGHT_MAX: usize = 64;

/// Entries that a takeover reads below the newest row, and the minimum of client ids that an owner keeps in memory. It
/// is twice the window of uncertain entries, so that a repeated client id in the window is always noticed.
pub const TAIL_ENTRIES: u64 = 2 * APPENDS_IN_FLIGHT_MAX as u64;

/// Newest entries that an owner keeps in memory for history and resume.
pub const RECENT_ENTRIES: usize = 64;

/// Client ids that an owner remembers. It finds older ones in `sends` if the frame says `retry`.
pub const RECENT_CLIENT_IDS: usize = 1024;

/// Operations that wait for one conversation's owner, plus the read and delivered marks that it is storing. Above this,
/// requests are refused with `unavailable`.
pub const MAILBOX_OPERATIONS_MAX: usize = 1024;
/// The part of [`MAILBOX_OPERATIONS_MAX`] that reads may not use, so that there is always room for messages.
pub const MAILBOX_OPERATIONS_KEPT: usize = 256;

/// Store queries that one conversation's owner runs at once.
pub const LOOKUPS_IN_FLIGHT_MAX: usize = 64;

/// One user's share of `limits.open_conversations`: a 16th, but at least [`USER_OPEN_MIN`]. These are open because of
/// that user's requests. Above the share, the user's least recently used one is evicted.
pub const USER_OPEN_DIVISOR: usize = 16;
pub const USER_OPEN_MIN: usize = 64;
/// Conversations of one user that wait until another one of that user is evicted: as many as one session can request at
/// once.
pub const OPENING_OF_USER_MAX: usize = REQUESTS_IN_FLIGHT_MAX;
/// Conversations of all users that wait until others are evicted. Above this, requests are refused with `unavailable`.
pub const OPENING_MAX: usize = 4_096;
/// One user's part of the places that are free in [`OPENING_MAX`]: a 32nd. A user can always have
/// [`OPENING_OF_USER_MAX`] waiting until half of all places are taken, and some places stay free for later users.
pub const USER_OPENING_DIVISOR: usize = OPENING_MAX / 2 / OPENING_OF_USER_MAX;

/// Conversations that load at once; more wait. Each load reads up to [`TAIL_ENTRIES`] entries, which are counted only
/// once they are read. With the largest messages (16 KiB of text and ten long links) that is 4.7 MB, and for a moment
/// twice that. Together with [`LOADS_AGAIN_MAX`] 16 load at once: 75 MB, and for a moment twice that.
pub const LOADS_MAX: usize = 12;
/// Additional loads that retry at once because the store did not answer. They have their own limit so that they delay
/// no others.
pub const LOADS_AGAIN_MAX: usize = 4;

/// Participants of a channel whose role an owner keeps in memory.
pub const CHANNEL_PARTICIPANTS_KNOWN_MAX: usize = 10_000;

/// By how much the version of a ring that is older than the log rises: more than a ring changes between a backup and its restore,
/// and little beside the 400,000 versions that ScyllaDB allows (docs/storage.md, Versions).
pub const RING_RAISE: u64 = 1 << 14;

/// Entries of one page of history, whatever the client asks for.
pub const PAGE_ENTRIES_MAX: usize = 200;

/// Entries of one page of history if the client names no number.
pub const PAGE_ENTRIES_DEFAULT: usize = 50;

/// Entries that all sessions together read from the store for pages at once; more reads wait. With the largest messages
/// (16 KiB of text and ten long links) these are 90 MB.
pub const READ_ENTRIES_MAX: usize = 1_600;

/// Items of one page of the inbox, of participants or of public conversations.
pub const PAGE_ITEMS_MAX: usize = 500;

/// Rows that one request for participants or public conversations reads. It skips rows of former participants and of
/// conversations that are private again. At this limit it answers with the items found and where to continue.
pub const SCAN_ROWS_MAX: usize = 2_000;

/// Entries pushed for one cursor at resume. Above this, the client gets a `resync`.
pub const RESUME_ENTRIES_MAX: u64 = 500;

/// Bytes in memory of the entries pushed for one cursor at resume. They are read page by page; above this, a `resync`
/// follows.
pub const RESUME_BYTES_MAX: usize = 4 << 20;

/// Entries pushed for all cursors of one resume. Each conversation beyond that gets a `resync`.
pub const RESUME_ENTRIES_TOTAL_MAX: u64 = 2_000;

/// Cursors of one `connect`.
pub const CURSORS_MAX: usize = 5_000;

/// Cursors of one `connect` for conversations that are not in the user's inbox. More are ignored.
pub const UNKNOWN_CURSORS_MAX: usize = 100;

/// Bytes of a conversation's name.
pub const NAME_BYTES_MAX: usize = 256;

/// The largest value of the setting `limits.group_participants`. The entry that creates a group names all participants.
pub const GROUP_PARTICIPANTS_MAX: usize = 10_000;

/// Attachments of one message.
pub const ATTACHMENTS_MAX: usize = 10;

/// Files for whose addresses one request may ask.
pub const FILES_ASKED_MAX: usize = 50;

/// Uploads that are written to at the same time. Each is an open file, of those that connections never use.
pub const UPLOADS_OPEN_MAX: usize = 64;

/// The least rate of the body of an upload, in bytes per second on average over [`UPLOAD_WINDOW`]. A slower body is refused,
/// so that nobody holds a place with a byte now and then. What has come counts, and the client continues.
pub const UPLOAD_BYTES_PER_SECOND_MIN: u64 = 4 << 10;
pub const UPLOAD_WINDOW: Duration = Duration::from_secs(30);

/// Time after which an upload gives its place to another user's if none is free.
pub const UPLOAD_KEEPS_PLACE: Duration = Duration::from_secs(60);

/// The longest wait of an upload for the place that another gives away.
pub const UPLOAD_WAIT: Duration = Duration::from_secs(5);

/// Time after the head of an upload's request in which the first bytes of its body must come.
pub const UPLOAD_BEGIN_MAX: Duration = Duration::from_secs(10);

/// Time after the last byte of a file in which its body must end. Then the file is completed anyway.
pub const UPLOAD_END_MAX: Duration = Duration::from_secs(2);

/// The longest time for which the request that completes a file waits until the gateway has looked at it.
pub const FILE_ANSWER_MAX: Duration = Duration::from_secs(30);

/// Time between two checks whether a running request may still upload: it costs a read, and a question to the owner.
pub const UPLOAD_CHECKED_EVERY: Duration = Duration::from_secs(5);

/// The longest request that uploads or downloads. The client continues with another one.
pub const UPLOAD_REQUEST_MAX: Duration = Duration::from_secs(3_600);
pub const DOWNLOAD_REQUEST_MAX: Duration = Duration::from_secs(3_600);

/// Files that clients download from this gateway at the same time. Each has a part of 128 KiB in memory, and another one on
/// its way, so these are 256 MiB.
pub const DOWNLOADS_MAX: usize = 1_024;

/// One user's part of [`DOWNLOADS_MAX`]. A page with many pictures waits for [`DOWNLOAD_WAIT`].
pub const DOWNLOADS_OF_USER_MAX: usize = 16;
pub const DOWNLOAD_WAIT: Duration = Duration::from_secs(10);

/// Time after which a download gives its place to another user's if none is free. Its client asks for the rest.
pub const DOWNLOAD_KEEPS_PLACE: Duration = Duration::from_secs(60);

/// Bytes of an attachment's link, and of its name and media type together.
pub const ATTACHMENT_BYTES_MAX: usize = 2_048;

/// Entries that one request deletes.
pub const DELETE_SEQS_MAX: usize = 256;

/// Edits of one entry. The state of the entry names them all, because deleting it erases them.
pub const EDITS_MAX: usize = 1_000;

/// Edits of all entries that one request deletes, if it deletes several. The change names them all.
pub const DELETED_EDITS_MAX: usize = 4 * EDITS_MAX;

/// Different emoji among the reactions to one entry.
pub const EMOJI_MAX: usize = 32;

/// Different emoji of one user among the reactions to one entry, so that no user takes all places.
pub const EMOJI_OF_USER_AT_ONCE_MAX: usize = 8;

/// Bytes of one emoji.
pub const EMOJI_BYTES_MAX: usize = 64;

/// The highest deleted seqs that a conversation and each inbox row keep. With more deletions in the unread part, the
/// unread count is too high until the user reads.
pub const DELETED_SEQS_KEPT: usize = 64;

/// Entries that an owner keeps in memory because somebody changed them or asked to. It is more than one request deletes, so
/// that all of them are there at once.
pub const ENTRIES_KNOWN_MAX: usize = 4 * DELETE_SEQS_MAX;

/// Users of whom an owner remembers the reactions to one entry.
pub const REACTORS_KNOWN_MAX: usize = 4_096;

/// The newest applied changes that an owner keeps in memory, and their bytes. Clients that were away for some seconds get
/// what they missed from there.
pub const RECENT_CHANGES: usize = 1_024;
pub const RECENT_CHANGES_BYTES: usize = 1 << 20;

/// Emoji with which one user has ever reacted to one entry, also those that they removed. The store keeps a row of each.
pub const EMOJI_OF_USER_MAX: usize = 64;

/// Time for which reactions wait before they are written, if earlier changes of the conversation are being stored. So a
/// conversation with up to some 6,000 reactions per second costs a hundred writes per second to the log of changes, and users
/// do not notice it.
pub const REACTIONS_REST: Duration = Duration::from_millis(10);

/// Changes of which an owner has not told yet. At this number it does not wait for more.
pub const CHANGES_UNTOLD_MAX: u64 = 1_024;

/// Changes that a client may be behind. Above this, it is told to read again.
pub const CHANGES_BEHIND_MAX: u64 = 5_000;

/// Changes of one page, whatever the client asks for.
pub const CHANGES_PAGE_MAX: usize = 256;

/// Bytes of the items of one `changed` event. Above this, clients are told to ask for the changes.
pub const CHANGED_BYTES_MAX: usize = 64 << 10;

/// Participants of the largest group in which a change is settled only when it was delivered. In larger groups and in
/// channels, gateways and clients that missed it ask for it.
pub const CHANGES_CONFIRMED_PARTICIPANTS_MAX: usize = 40;

/// Devices of one user. All of them are one row.
pub const DEVICES_MAX: usize = 10;

/// Bytes of a device's id.
pub const DEVICE_ID_BYTES_MAX: usize = 64;

/// Bytes of the token of a device, or of a browser's subscription.
pub const TOKEN_BYTES_MAX: usize = 4 << 10;

/// The latest time until which a conversation can be muted: the latest one that JavaScript knows.
pub const MUTED_UNTIL_MAX: i64 = 8_640_000_000_000_000;

/// Code points of the body that the inbox shows.
pub const PREVIEW_CHARS: usize = 100;

/// Users that one session may watch.
pub const WATCHED_MAX: usize = 500;

/// Channels that one session may subscribe to without having joined them.
pub const SUBSCRIPTIONS_MAX: usize = 100;

/// Other conversations or users that one request asks about at once.
pub const HEADS_AT_ONCE: usize = 16;

/// Channels that a user may be in and still join another. Each of the user's sessions is subscribed to each of them.
pub const CHANNELS_JOINED_MAX: usize = 5_000;

/// Channels that a session subscribes to or leaves in one step, while other sessions that do the same wait.
pub const CHANNELS_AT_ONCE: usize = 100;

/// Channels that a user may be removed from while one of their sessions connects. Above this, the session is closed and
/// must connect again.
pub const REMOVED_WHILE_CONNECTING_MAX: usize = 100;

/// Concurrent requests of one session. At this number its socket is not read.
pub const REQUESTS_IN_FLIGHT_MAX: usize = 64;

/// Conversations whose inbox rows wait to be written. At this number, appends are refused with `unavailable`.
pub const INBOX_CONVERSATIONS_PENDING_MAX: usize = 100_000;

/// Files that the embedded store keeps open. It opens others when it reads them.
pub const STORE_FILES_OPEN_MAX: usize = 256;

/// The longest validity of a token that the command line prints, in seconds: ten years.
pub const TOKEN_S_MAX: u64 = 3_650 * 86_400;

/// Open files that client connections never use: those of the store, and 512 for its writes, links to other gateways,
/// Cassandra nodes, the internal port, and connections that are being refused.
pub const OPEN_FILES_RESERVED: usize = 512 + STORE_FILES_OPEN_MAX;

/// Bytes of a picture that is looked at. They are in memory, and those without the metadata beside them. A larger one stays
/// as it was uploaded.
pub const PICTURE_BYTES_MAX: u64 = 32 << 20;

/// Files that wait for one kind of work that takes long (decoding pictures, the scanner, reading from a bucket), or are
/// worked on. More are looked at later.
pub const FILES_WAITING_MAX: usize = 256;

/// Those of one user.
pub const FILES_WAITING_OF_USER_MAX: usize = 8;

/// Files that are looked at later, because too many wait or the scanner is away. More are left to a sweep, and to clients
/// that ask.
pub const FILES_LATER_MAX: usize = 4_096;

/// Files of these that try again at the same time, every few seconds.
pub const FILES_LATER_AT_ONCE: usize = 16;

/// Bytes of address space of a process that decodes a picture: its program, the picture, the decoder and the thumbnail.
/// Ordinary pictures of 40 megapixels need up to 640 MiB (docs/attachments.md).
pub const DECODER_BYTES_MAX: u64 = 768 << 20;

/// Seconds of CPU time of a process that decodes a picture. One of 40 megapixels takes about two.
pub const DECODER_CPU_MAX_S: u64 = 20;

/// Time after which such a process is killed, also if it got no CPU time.
pub const DECODER_TIME_MAX: Duration = Duration::from_secs(60);

/// The cost of a `connect` in the byte rate of its user: it checks a token, reads an inbox and informs other gateways.
pub const CONNECT_BYTES: usize = 128 << 10;

/// The time after the start of a drain in which requests on their way are still answered. Then connections without a whole
/// request are closed.
pub const LAST_REQUEST: Duration = Duration::from_millis(500);

/// Bytes of a frame of a peer that has not proved that it knows the cluster's secret. A proof is much shorter.
pub const PEER_UNPROVEN_FRAME_BYTES_MAX: usize = 1 << 10;
/// Connections of peers that have not proved it. One more closes the oldest: a gateway proves it in milliseconds, and a
/// stranger cannot keep the others out by staying.
pub const PEERS_UNPROVEN_MAX: usize = 64;

/// Connections of the internal port.
pub const INTERNAL_CONNECTIONS_MAX: usize = 128;

/// Connections above a limit that are answered with the reason at once. More are closed without an answer.
pub const REFUSALS_AT_ONCE_MAX: usize = 64;

/// Requests to webhooks and push services that are sent at once; more wait. Each has a connection.
pub const HTTP_REQUESTS_MAX: usize = 256;

/// Names that are resolved at once for webhooks and push services. Each has a thread.
pub const HTTP_LOOKUPS_MAX: usize = 16;

/// Bytes that are read of the answer of a webhook or push service.
pub const HTTP_ANSWER_BYTES_MAX: usize = 64 << 10;

/// Webhooks of the configuration.
pub const WEBHOOKS_MAX: usize = 16;

/// Bytes of the events in one request to a webhook, unless one event is larger.
pub const WEBHOOK_BATCH_BYTES_MAX: usize = 256 << 10;

/// Conversations of which one gateway remembers that a webhook has to get events. With what is known of their failures they
/// take at most 16 MiB. Above this, a conversation is forgotten here and found again by its `lagging` row.
pub const WEBHOOK_CONVERSATIONS_MAX: usize = 100_000;

/// Conversations that failed while a webhook was down. If there are more, the oldest do not count as failures of their own.
pub const WEBHOOK_SUSPECTS_MAX: usize = 1_024;

/// The earliest time of an imported conversation, message or change: 1980, in milliseconds since 1970. Every time of today
/// that is in seconds by mistake is earlier.
pub const IMPORT_TIME_MIN: Millis = 315_532_800_000;

/// How far ahead of the importing machine's clock imported times may be, in milliseconds. The other system's clock or its
/// time zone may have been wrong.
pub const IMPORT_AHEAD_MAX_MS: Millis = 86_400_000;

const _: () = assert!(INTERNAL_CONNECTIONS_MAX + 2 * REFUSALS_AT_ONCE_MAX <= 256);
const _: () = assert!(TAIL_ENTRIES as usize <= RECENT_CLIENT_IDS);
const _: () = assert!(RECENT_ENTRIES <= TAIL_ENTRIES as usize);
const _: () = assert!(PAGE_ENTRIES_DEFAULT <= PAGE_ENTRIES_MAX);
