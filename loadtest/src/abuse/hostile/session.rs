//! One hostile session: its connection, its misuse, and what comes of it.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    thread::sleep,
    time::{Duration, Instant},
};

use memchr::memmem;
use socket2::{Domain, SockRef, Socket, Type};

use super::{Activity, TICK, Tally};
use crate::{
    abuse::attacks::{
        Attack, BOMBS_AT_ONCE, Hostile, KINDS, Opening, PICTURE_BOMBS, Piece, Reading, TIMED_OUT,
        Then, opening,
    },
    client::{Frame, Frames, pong_frame},
};

/// Time after which a session whose connection ended connects again.
const BREATH: Duration = Duration::from_millis(2);
/// Time without progress after which a session gives up a connection.
const STUCK: Duration = Duration::from_millis(300);
/// Bytes that a slow session reads at most in one turn.
const SLOW_BYTES: usize = 256;
/// Kernel receive buffer of sessions that read slowly or not at all.
const SMALL_BUFFER: usize = 4 << 10;

/// Beginning of the outcome of a failed write.
const WRITING: &str = "writing";

pub(super) struct Session {
    pub(super) who: Hostile,
    pub(super) kind: usize,
    kind_began: Instant,
    pub(super) attack: Attack,
    /// Number of the next piece.
    piece: usize,
    /// When it is due.
    due: Instant,
    connection: Option<Connection>,
    /// Connections that are left open, by kind.
    kept: HashMap<usize, VecDeque<TcpStream>>,
    /// Number of times that the first piece was written, from a random start.
    counter: u64,
    activity: Activity,
    last_act: Instant,
    second: (Instant, u64),
}

struct Connection {
    stream: TcpStream,
    /// The rest of the opening bytes.
    opening: Vec<u8>,
    /// Bytes written of the current piece.
    written: usize,
    state: State,
    frames: Frames,
    /// The time of the last progress.
    moved: Instant,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum State {
    /// The upgrade is not answered yet.
    Head,
    /// `connect` is not answered yet.
    Connecting,
    Open,
}

/// Why a connection ended.
struct Over(String);

impl Session {
    pub(super) fn new(who: Hostile, kind: usize) -> Self {
        let now = Instant::now();
        let activity = Activity {
            least_per_second: u64::MAX,
            ..Activity::default()
        };
        // Sessions count in different ranges, so that their ids differ.
        let counter = u64::from(rand::random::<u32>()) * 100;
        Self {
            attack: KINDS[kind].1(&who),
            who,
            kind,
            kind_began: now,
            piece: 0,
            due: now,
            connection: None,
            kept: HashMap::new(),
            counter,
            activity,
            last_act: now,
            second: (now, 0),
        }
    }

    /// Encodes the current kind of misuse.
    pub(super) fn prepare(&mut self) {
        self.attack = KINDS[self.kind].1(&self.who);
    }

    pub(super) fn begin(&mut self, now: Instant, turn: Duration) {
        self.last_act = now;
        self.second = (now, 0);
        // Sessions must not all change their kind at the same moment.
        self.kind_began = now - turn.mul_f64(rand::random::<f64>() / 2.0);
        self.restart(now);
    }

    pub(super) fn restart(&mut self, now: Instant) {
        (self.connection, self.piece, self.due) = (None, 0, now);
    }

    pub(super) fn next_kind(
        &mut self,
        now: Instant,
        turn: Duration,
        only: Option<usize>,
        kinds: &mut [Tally],
    ) {
        let length = now - self.kind_began;
        if length >= turn {
            kinds[self.kind].milliseconds += length.as_millis() as u64;
            kinds[self.kind].held += self.held();
            self.forget_picture();
            self.kind = only.unwrap_or((self.kind + 1) % KINDS.len());
            self.kind_began = now;
            self.prepare();
            self.restart(now);
        }
    }

    pub(super) fn stop(&mut self, now: Instant, kinds: &mut [Tally]) {
        kinds[self.kind].milliseconds += (now - self.kind_began).as_millis() as u64;
        kinds[self.kind].held += self.held();
        let idle = (now - self.last_act).as_millis() as u64;
        self.activity.idle_ms = self.activity.idle_ms.max(idle);
        self.forget_picture();
        self.who.bombs_left = BOMBS_AT_ONCE;
        self.restart(now);
        self.kept.clear();
    }

    /// Takes the picture that was sent from those that may be sent. The last one stays, to be asked for.
    fn forget_picture(&mut self) {
        if KINDS[self.kind].0 == PICTURE_BOMBS && self.who.bombs_left > 0 {
            self.who.bombs_left -= 1;
            if self.who.bombs.len() > 1 {
                self.who.bombs.pop();
            }
        }
    }

    /// 1 if the gateway has not answered the session's `connect` yet.
    fn held(&self) -> u64 {
        let connecting = |connection: &Connection| connection.state == State::Connecting;
        u64::from(self.connection.as_ref().is_some_and(connecting))
    }

    pub(super) fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Opens connections that the gateway must end by its time-outs.
    pub(super) fn leave(&mut self) {
        const EACH: usize = 8;
        let now = Instant::now();
        let builds = KINDS.iter().filter(|(name, _)| TIMED_OUT.contains(name));
        for (kind, (_, build)) in builds.enumerate() {
            let attack = build(&self.who);
            for _ in 0..EACH {
                let Ok(mut connection) = Connection::open(&self.who, &attack, now) else {
                    continue;
                };
                // The non-blocking connect needs a moment.
                sleep(TICK);
                // Writing fails if the gateway has refused the connection.
                let _ = connection.write_opening(now);
                for piece in &attack.pieces {
                    let _ = connection.write(piece, now);
                }
                self.kept
                    .entry(kind)
                    .or_default()
                    .push_back(connection.stream);
            }
        }
    }

    pub(super) fn activity(&self) -> Activity {
        let mut activity = self.activity.clone();
        if activity.least_per_second == u64::MAX {
            activity.least_per_second = activity.acts;
        }
        activity
    }

    fn note_act(&mut self, now: Instant) {
        const SECOND: Duration = Duration::from_secs(1);
        let activity = &mut self.activity;
        let idle = (now - self.last_act).as_millis() as u64;
        activity.idle_ms = activity.idle_ms.max(idle);
        activity.acts += 1;
        self.last_act = now;
        if now - self.second.0 >= SECOND {
            activity.least_per_second = activity.least_per_second.min(self.second.1);
            self.second = (now, 0);
        }
        self.second.1 += 1;
    }

    /// Takes a turn: reads, and writes a piece that is due.
    pub(super) fn act(&mut self, now: Instant, tally: &mut Tally, buffer: &mut [u8]) {
        let Err(Over(mut why)) = self.go_on(now, tally, buffer) else {
            return;
        };
        // If writing failed, the reason may be in the receive buffer.
        if why.starts_with(WRITING)
            && let Some(connection) = &mut self.connection
            && let Err(Over(told)) = connection.read(&self.attack, now, tally, buffer)
        {
            why = told;
        }
        tally.refused += u64::from(is_refused(&why));
        *tally.outcomes.entry(why).or_default() += 1;
        self.restart(now);
        self.due = now + BREATH;
    }

    fn go_on(&mut self, now: Instant, tally: &mut Tally, buffer: &mut [u8]) -> Result<(), Over> {
        if self.connection.is_none() {
            if now < self.due {
                return Ok(());
            }
            tally.connections += 1;
            self.connection = Some(Connection::open(&self.who, &self.attack, now)?);
        }
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        let opened = connection.write_opening(now)?;
        // A completed upgrade counts as an act, a mere attempt does not.
        if connection.read(&self.attack, now, tally, buffer)? {
            self.note_act(now);
        }
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        if !opened || connection.state != State::Open || now < self.due {
            return connection.check(now, self.due);
        }
        let Some(piece) = self.attack.pieces.get_mut(self.piece) else {
            return self.end(now, tally);
        };
        if connection.written == 0 {
            self.counter += u64::from(self.piece == 0);
            piece.count(self.counter);
        }
        if !connection.write(piece, now)? {
            return connection.check(now, self.due);
        }
        connection.written = 0;
        tally.acts += 1;
        tally.bytes += piece.bytes.len() as u64;
        self.activity.bytes += piece.bytes.len() as u64;
        self.note_act(now);
        self.piece += 1;
        self.due = now + self.attack.every;
        if self.piece == self.attack.pieces.len() && self.attack.then == Then::Again {
            self.piece = 0;
        }
        Ok(())
    }

    /// Handles the connection after the last piece.
    fn end(&mut self, now: Instant, tally: &mut Tally) -> Result<(), Over> {
        let connection = self.connection.take();
        if let (Then::Keep(count), Some(connection)) = (self.attack.then, connection) {
            let kept = self.kept.entry(self.kind).or_default();
            kept.push_back(connection.stream);
            if kept.len() > count {
                kept.pop_front();
            }
            tally.acts += 1;
            self.note_act(now);
        }
        self.restart(now);
        self.due = now + self.attack.every;
        Ok(())
    }
}

impl Connection {
    fn open(who: &Hostile, attack: &Attack, now: Instant) -> Result<Self, Over> {
        let small = attack.reading != Reading::All;
        let stream =
            connect(who, small).map_err(|error| Over(format!("connect: {}", error.kind())))?;
        Ok(Self {
            stream,
            opening: opening(who, &attack.opening),
            written: 0,
            state: match attack.opening {
                Opening::Socket => State::Open,
                Opening::Upgrade | Opening::Connect(_) => State::Head,
            },
            frames: Frames::default(),
            moved: now,
        })
    }

    /// Writes the opening bytes. True once all are written.
    fn write_opening(&mut self, now: Instant) -> Result<bool, Over> {
        if self.opening.is_empty() {
            return Ok(true);
        }
        let count = written(self.stream.write(&self.opening))?;
        if count > 0 {
            self.moved = now;
            self.opening.drain(..count);
        }
        Ok(self.opening.is_empty())
    }

    /// Writes a piece. True once all of it is written.
    fn write(&mut self, piece: &Piece, now: Instant) -> Result<bool, Over> {
        let count = written(self.stream.write(&piece.bytes[self.written..]))?;
        if count > 0 {
            self.moved = now;
            self.written += count;
        }
        Ok(self.written == piece.bytes.len())
    }

    /// Reads and evaluates received bytes. True if they complete the upgrade.
    fn read(
        &mut self,
        attack: &Attack,
        now: Instant,
        tally: &mut Tally,
        buffer: &mut [u8],
    ) -> Result<bool, Over> {
        let most = match (self.state, attack.reading) {
            (State::Open, Reading::Never) => return Ok(false),
            (State::Open, Reading::Slow) => SLOW_BYTES,
            (State::Head | State::Connecting, _) | (_, Reading::All) => buffer.len(),
        };
        let bytes = match self.stream.read(&mut buffer[..most]) {
            Ok(0) => return Err(Over("closed without a code".to_owned())),
            Ok(count) => &buffer[..count],
            Err(error) if is_later(&error) => return Ok(false),
            Err(error) => return Err(Over(format!("reading: {}", error.kind()))),
        };
        self.moved = now;
        let upgraded = self.state == State::Head;
        let bytes = if upgraded {
            if !bytes.starts_with(b"HTTP/1.1 101") {
                return Err(Over(status(bytes)));
            }
            self.state = match attack.opening {
                Opening::Connect(_) => State::Connecting,
                Opening::Socket | Opening::Upgrade => State::Open,
            };
            let end = memmem::find(bytes, b"\r\n\r\n").map_or(bytes.len(), |at| at + 4);
            &bytes[end..]
        } else if matches!(attack.opening, Opening::Socket) {
            return Err(Over(status(bytes)));
        } else {
            bytes
        };
        let (mut pings, mut closed) = (0, None);
        let state = &mut self.state;
        self.frames.feed(bytes, |frame| match frame {
            Frame::Content(text) => {
                *state = State::Open;
                if let Some(code) = refusal(text) {
                    *tally.outcomes.entry(code.to_owned()).or_default() += 1;
                }
            }
            Frame::Ping => pings += 1,
            Frame::Close(code) => closed = Some(code),
            Frame::Other => {}
        });
        match closed {
            Some(code) => return Err(Over(format!("closed {code}"))),
            // A pong in the middle of a piece would break its frame.
            None if pings > 0 && self.written == 0 => drop(self.stream.write(pong_frame())),
            None => {}
        }
        Ok(upgraded)
    }

    /// An error if the connection has made no progress for `STUCK`.
    fn check(&self, now: Instant, due: Instant) -> Result<(), Over> {
        if now > due && now - self.moved.max(due) > STUCK {
            return Err(Over("given up".to_owned()));
        }
        Ok(())
    }
}

/// Begins to connect without waiting. The socket is reset when it is closed, so that its port is free at once.
fn connect(who: &Hostile, small: bool) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
    if small {
        socket.set_recv_buffer_size(SMALL_BUFFER)?;
    }
    socket.set_tcp_nodelay(true)?;
    socket.bind(&SocketAddr::new(who.source, 0).into())?;
    match socket.connect(&who.server.into()) {
        // 115 is EINPROGRESS, for which `ErrorKind` has no variant.
        Err(error) if !is_later(&error) && error.raw_os_error() != Some(115) => Err(error),
        _ => Ok(socket.into()),
    }
}

fn written(result: io::Result<usize>) -> Result<usize, Over> {
    match result {
        Ok(count) => Ok(count),
        Err(error) if is_later(&error) => Ok(0),
        Err(error) => Err(Over(format!("{WRITING}: {}", error.kind()))),
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::NotConnected
    )
}

/// The status of an HTTP response, as an outcome.
fn status(bytes: &[u8]) -> String {
    let code = bytes.get(9..12).unwrap_or_default();
    format!("HTTP {}", String::from_utf8_lossy(code))
}

/// Whether a connection ended because the gateway refused it.
fn is_refused(why: &str) -> bool {
    matches!(why, "HTTP 429" | "HTTP 503")
        || why.ends_with(&ErrorKind::ConnectionRefused.to_string())
}

/// The code of an error frame, in either encoding.
fn refusal(frame: &[u8]) -> Option<&'static str> {
    const CODES: [&str; 9] = [
        "bad_request",
        "unauthorized",
        "forbidden",
        "not_found",
        "conflict",
        "too_large",
        "rate_limited",
        "unavailable",
        "internal",
    ];
    let begin = &frame[..frame.len().min(64)];
    memmem::find(begin, b"error")?;
    CODES
        .into_iter()
        .find(|code| memmem::find(begin, code.as_bytes()).is_some())
}
