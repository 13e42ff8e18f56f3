//! Every bound that is not a setting: its name, its unit, its reason.

/// Bytes of a user id. It is part of keys and of every event.
pub const USER_ID_BYTES_MAX: usize = 64;

/// Entries of one conversation between their append and the moment they are settled (committed, and their
/// membership changes applied). A takeover has at most this many uncertain entries to look at.
pub const APPENDS_IN_FLIGHT_MAX: usize = 64;

/// Entries a takeover reads below the newest row, and an owner keeps in memory at least as client ids:
/// twice the window, so that a repeated client id within it is always noticed.
pub const TAIL_ENTRIES: u64 = 2 * APPENDS_IN_FLIGHT_MAX as u64;

/// Newest entries an owner keeps in memory for history and resume.
pub const RECENT_ENTRIES: usize = 64;

/// Client ids an owner remembers; older ones are found in `sends` when the frame says `retry`.
pub const RECENT_CLIENT_IDS: usize = 1024;

/// Operations waiting for one conversation's owner, and read and delivered marks that it is storing; one more is refused
/// with `unavailable`.
pub const MAILBOX_OPERATIONS_MAX: usize = 1024;
/// Of these, what is kept free of reads: however many want to read, there is room for messages.
pub const MAILBOX_OPERATIONS_KEPT: usize = 256;

/// Questions to the store that one conversation's owner has open at once.
pub const QUESTIONS_IN_FLIGHT_MAX: usize = 64;

/// One user's share of `limits.open_conversations`: a 16th, and at least 64, is open because of their requests. For one
/// more, the one of these that was not used for longest is evicted.
pub const USER_OPEN_PART: usize = 16;
pub const USER_OPEN_MIN: usize = 64;
/// Conversations that wait until one more of their user's has been evicted: as many as one session may ask for at once.
pub const OPENING_OF_USER_MAX: usize = REQUESTS_IN_FLIGHT_MAX;
/// Conversations of all users that wait until others have been evicted; for one more, requests get `unavailable`.
pub const OPENING_MAX: usize = 4_096;
/// One user's part of those that may still wait: a 32nd, so that nobody has less than their 64 before half of them wait, and
/// there is something left for one who comes later.
pub const OPENING_PART: usize = OPENING_MAX / 2 / OPENING_OF_USER_MAX;

/// Conversations that are loaded at once; more wait. Each reads up to [`TAIL_ENTRIES`] entries, which are counted only when
/// they are read: of the largest messages (16 KiB of text and ten long links) 4.7 MB, and for a moment twice that. With those
/// below 16 at once, so 75 MB, and for a moment twice that.
pub const LOADS_MAX: usize = 12;
/// Loads that go on at once after the store did not answer them, besides those above: they hold up no others.
pub const LOADS_AGAIN_MAX: usize = 4;

/// Participants of a channel whose role an owner keeps in memory.
pub const CHANNEL_PARTICIPANTS_KNOWN_MAX: usize = 10_000;

/// Entries of one page of history, whatever the client asks for.
pub const PAGE_ENTRIES_MAX: usize = 200;

/// Entries of one page of history when the client does not say.
pub const PAGE_ENTRIES_DEFAULT: usize = 50;

/// Entries that are being read from the store for pages at once, by all sessions; more wait. Of the largest messages
/// (16 KiB of text and ten long links) these are 90 MB.
pub const READ_ENTRIES_MAX: usize = 1_600;

/// Items of one page of inbox, participants or public conversations.
pub const PAGE_ITEMS_MAX: usize = 500;

/// Rows that one request for participants or public conversations looks at: it passes over those of former participants,
/// and of what is not public any more, and answers with what it has found by then and from where to go on.
pub const SCAN_ROWS_MAX: usize = 2_000;

/// Entries pushed for one cursor at resume; more is a `resync`.
pub const RESUME_ENTRIES_MAX: u64 = 500;

/// Bytes of these entries in memory; after so many a `resync` follows. They are read a page at a time.
pub const RESUME_BYTES_MAX: usize = 4 << 20;

/// Entries pushed for all cursors of one resume; conversations beyond that get a `resync` each.
pub const RESUME_ENTRIES_TOTAL_MAX: u64 = 2_000;

/// Cursors of one `connect`.
pub const CURSORS_MAX: usize = 5_000;

/// Cursors of one `connect` for conversations that are not in the user's inbox; more are ignored.
pub const UNKNOWN_CURSORS_MAX: usize = 100;

/// Bytes of a conversation's name.
pub const NAME_BYTES_MAX: usize = 256;

/// The most that the setting `limits.group_participants` may allow: a group's creation names all of them in one entry.
pub const GROUP_PARTICIPANTS_MAX: usize = 10_000;

/// Links of one message.
pub const ATTACHMENTS_MAX: usize = 10;

/// Bytes of an attachment's link, and of its name and type together.
pub const ATTACHMENT_BYTES_MAX: usize = 2_048;

/// Characters of a body shown in the inbox.
pub const PREVIEW_CHARS: usize = 100;

/// Users one session may watch.
pub const WATCHED_MAX: usize = 500;

/// Channels one session may look into without having joined.
pub const SUBSCRIPTIONS_MAX: usize = 100;

/// Other conversations or users that one request asks about at once.
pub const HEADS_AT_ONCE: usize = 16;

/// Channels that a user may be in and still join one more: each of their sessions keeps a place in each.
pub const CHANNELS_JOINED_MAX: usize = 5_000;

/// Channels that a session begins or ends to follow while the others who do so wait.
pub const CHANNELS_AT_ONCE: usize = 100;

/// Channels that a user may be removed from while one of their sessions connects; at one more it must connect again.
pub const REMOVED_WHILE_CONNECTING_MAX: usize = 100;

/// Requests of one session under way at once; with more, its socket is not read.
pub const REQUESTS_IN_FLIGHT_MAX: usize = 64;

/// Conversations whose inbox rows wait to be written. At this number, appends are refused with `unavailable`.
pub const INBOX_CONVERSATIONS_PENDING_MAX: usize = 100_000;

/// Files of the embedded store that stay open. Others are opened when they are read.
pub const STORE_FILES_OPEN_MAX: usize = 256;

/// Open files that client connections never take: those of the store, and 512 for what it writes, links to other gateways,
/// nodes of Cassandra, the internal port, and connections that are being refused.
pub const OPEN_FILES_RESERVED: usize = 512 + STORE_FILES_OPEN_MAX;

/// What a `connect` costs, counted as bytes asked for: a token is checked, an inbox read, other gateways are told.
pub const CONNECT_BYTES: usize = 128 << 10;

/// Connections of the internal port.
pub const INTERNAL_CONNECTIONS_MAX: usize = 128;

/// Connections above a limit that are told so at the same time; any more are closed without a word.
pub const REFUSALS_AT_ONCE_MAX: usize = 64;

const _: () = assert!(INTERNAL_CONNECTIONS_MAX + 2 * REFUSALS_AT_ONCE_MAX <= 256);
const _: () = assert!(TAIL_ENTRIES as usize <= RECENT_CLIENT_IDS);
const _: () = assert!(RECENT_ENTRIES <= TAIL_ENTRIES as usize);
const _: () = assert!(PAGE_ENTRIES_DEFAULT <= PAGE_ENTRIES_MAX);
