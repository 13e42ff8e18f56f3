//! Hostile sessions, all of them in one thread of a process of its own that is told when to begin and when to stop. What
//! they say is encoded before, and each has a turn once in a millisecond, so they cost the gateway's processors little:
//! a run measures the gateway, not its attackers. Each does one kind of misuse after the other, several at the same time.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::mpsc::{self, TryRecvError},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::Context;
use memchr::memmem;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockRef, Socket, Type};

use crate::{
    attacks::{
        Attack, Hostile, KINDS, Opening, Piece, Reading, TIMED_OUT, Then, busy_writer, opening,
    },
    client::{Frame, Frames, pong_frame},
};

/// What the process is told first, as one line of JSON.
#[derive(Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) hostiles: Vec<Hostile>,
    /// The session that writes to the busy channel.
    pub(crate) writer: Hostile,
    /// After so long a session goes on to the next kind of misuse.
    pub(crate) turn_ms: u64,
    /// The only kind of misuse, by its number; all in turn without it.
    pub(crate) only: Option<usize>,
}

/// All begin. No answer; until the next line, which stops them.
pub(crate) const BEGIN: &str = "begin";
/// All stop, and close every connection. Answered with `Done`, as one line of JSON.
pub(crate) const STOP: &str = "stop";
/// Once they have stopped, each opens connections that the gateway must close by itself. Answered with `Done`.
pub(crate) const LEAVE: &str = "leave";

/// What was done since the process began.
#[derive(Serialize, Deserialize, Default)]
pub(crate) struct Done {
    pub(crate) sessions: Vec<Activity>,
    pub(crate) kinds: BTreeMap<String, Tally>,
    /// The longest time between two turns of a session; long if this process itself was held up.
    pub(crate) turn_ms_max: u64,
}

/// Of one session.
#[derive(Serialize, Deserialize, Default, Clone)]
pub(crate) struct Activity {
    pub(crate) acts: u64,
    pub(crate) bytes: u64,
    /// In the second in which it did least.
    pub(crate) least_per_second: u64,
    /// The longest time between two acts.
    pub(crate) idle_ms: u64,
}

/// Of one kind of misuse.
#[derive(Serialize, Deserialize, Default, Clone)]
pub(crate) struct Tally {
    /// Pieces that were written whole, and connections that were left alone on purpose.
    pub(crate) acts: u64,
    pub(crate) bytes: u64,
    /// Attempts to connect.
    pub(crate) connections: u64,
    /// Those of them that the gateway did not let in.
    pub(crate) refused: u64,
    /// Turns that ended while a `connect` was not answered yet: its user had used up what a user may ask for.
    pub(crate) held: u64,
    pub(crate) milliseconds: u64,
    /// How connections ended, and which requests were refused.
    pub(crate) outcomes: BTreeMap<String, u64>,
}

/// Between two turns of a session.
const TICK: Duration = Duration::from_millis(1);
/// Between two connections of a session that are refused.
const BREATH: Duration = Duration::from_millis(2);
/// A connection on which nothing moved for so long is given up for another one.
const STUCK: Duration = Duration::from_millis(300);
/// What a session reads at most in one turn, and what it reads if it is slow.
const READ_BYTES: usize = 64 << 10;
const SLOW_BYTES: usize = 256;
/// The kernel's buffer of those who read slowly or not at all.
const SMALL_BUFFER: usize = 4 << 10;

const WRITING: &str = "writing";

/// Until its input ends.
pub(crate) fn serve() -> anyhow::Result<()> {
    let mut lines = BufReader::new(io::stdin()).lines();
    let orders: Orders = serde_json::from_str(&lines.next().context("no orders")??)?;
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let turn = Duration::from_millis(orders.turn_ms);
    let count = orders.hostiles.len();
    let mut sessions: Vec<_> = (0..)
        .zip(orders.hostiles)
        // Neighbours begin far from each other, so that all kinds meet.
        .map(|(number, who)| {
            let kind = orders.only.unwrap_or(number * KINDS.len() / count);
            Session::new(who, kind)
        })
        .collect();
    let mut writer = Session::new(orders.writer, 0);
    let mut kinds: Vec<_> = KINDS.iter().map(|_| Tally::default()).collect();
    let mut buffer = vec![0; READ_BYTES];
    let mut turn_max = Duration::ZERO;
    for line in &told {
        if line == LEAVE {
            sessions.iter_mut().for_each(Session::leave);
        } else {
            for session in &mut sessions {
                session.prepare();
            }
            writer.attack = busy_writer(&writer.who);
            let begin = Instant::now();
            for session in &mut sessions {
                session.begin(begin, turn);
            }
            writer.restart(begin);
            let mut before = begin;
            while let Err(TryRecvError::Empty) = told.try_recv() {
                let now = Instant::now();
                turn_max = turn_max.max(now - before);
                before = now;
                for session in &mut sessions {
                    session.next_kind(now, turn, orders.only, &mut kinds);
                    let kind = &mut kinds[session.kind];
                    session.act(now, kind, &mut buffer);
                }
                writer.act(now, &mut Tally::default(), &mut buffer);
                sleep(TICK.saturating_sub(now.elapsed()));
            }
            for session in &mut sessions {
                session.stop(Instant::now(), &mut kinds);
            }
            writer.connection = None;
        }
        let names = KINDS.iter().map(|(name, _)| (*name).to_owned());
        let done = Done {
            sessions: sessions.iter().map(Session::activity).collect(),
            kinds: names.zip(kinds.iter().cloned()).collect(),
            turn_ms_max: turn_max.as_millis() as u64,
        };
        println!("{}", serde_json::to_string(&done)?);
    }
    Ok(())
}

struct Session {
    who: Hostile,
    kind: usize,
    kind_began: Instant,
    attack: Attack,
    /// Which piece is written next.
    piece: usize,
    /// When.
    due: Instant,
    connection: Option<Connection>,
    /// Left alone, by kind.
    kept: HashMap<usize, VecDeque<TcpStream>>,
    /// How often the first piece was written.
    counter: u64,
    activity: Activity,
    last_act: Instant,
    second: (Instant, u64),
}

struct Connection {
    stream: TcpStream,
    /// What is not written yet.
    opening: Vec<u8>,
    written: usize,
    state: State,
    frames: Frames,
    moved: Instant,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum State {
    /// The answer to the upgrade is not there yet.
    Head,
    /// The reply to `connect` is not.
    Connecting,
    Open,
}

/// Why a connection is over.
struct Over(String);

impl Session {
    fn new(who: Hostile, kind: usize) -> Self {
        let now = Instant::now();
        let activity = Activity {
            least_per_second: u64::MAX,
            ..Activity::default()
        };
        // Each counts in a range of its own.
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

    /// Encodes what it says first.
    fn prepare(&mut self) {
        self.attack = KINDS[self.kind].1(&self.who);
    }

    fn begin(&mut self, now: Instant, turn: Duration) {
        self.last_act = now;
        self.second = (now, 0);
        // Not all change at the same moment.
        self.kind_began = now - turn.mul_f64(rand::random::<f64>() / 2.0);
        self.restart(now);
    }

    fn restart(&mut self, now: Instant) {
        (self.connection, self.piece, self.due) = (None, 0, now);
    }

    fn next_kind(
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
            self.kind = only.unwrap_or((self.kind + 1) % KINDS.len());
            self.kind_began = now;
            self.prepare();
            self.restart(now);
        }
    }

    fn stop(&mut self, now: Instant, kinds: &mut [Tally]) {
        kinds[self.kind].milliseconds += (now - self.kind_began).as_millis() as u64;
        kinds[self.kind].held += self.held();
        let idle = (now - self.last_act).as_millis() as u64;
        self.activity.idle_ms = self.activity.idle_ms.max(idle);
        self.restart(now);
        self.kept.clear();
    }

    /// One if the gateway has not answered this session's `connect` yet.
    fn held(&self) -> u64 {
        let connecting = |connection: &Connection| connection.state == State::Connecting;
        u64::from(self.connection.as_ref().is_some_and(connecting))
    }

    /// Leaves connections open.
    fn leave(&mut self) {
        const EACH: usize = 8;
        let now = Instant::now();
        let builds = KINDS.iter().filter(|(name, _)| TIMED_OUT.contains(name));
        for (kind, (_, build)) in builds.enumerate() {
            let attack = build(&self.who);
            for _ in 0..EACH {
                let Ok(mut connection) = Connection::open(&self.who, &attack, now) else {
                    continue;
                };
                // Until it is connected.
                sleep(TICK);
                // What the gateway refuses already, it has closed.
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

    fn activity(&self) -> Activity {
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

    /// Its turn: reads, and writes what is due.
    fn act(&mut self, now: Instant, tally: &mut Tally, buffer: &mut [u8]) {
        let Err(Over(mut why)) = self.go_on(now, tally, buffer) else {
            return;
        };
        // What could not be written any more was perhaps told why.
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
        // An attempt is no act: only who is let in does anything.
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

    /// All pieces are written.
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

    /// True once all of it is written.
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

    /// True if all of the piece is written.
    fn write(&mut self, piece: &Piece, now: Instant) -> Result<bool, Over> {
        let count = written(self.stream.write(&piece.bytes[self.written..]))?;
        if count > 0 {
            self.moved = now;
            self.written += count;
        }
        Ok(self.written == piece.bytes.len())
    }

    /// Reads some of what has come, and looks at it; true if that completes the upgrade.
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
            // Between two pieces only: else it would be in the middle of one.
            None if pings > 0 && self.written == 0 => drop(self.stream.write(pong_frame())),
            None => {}
        }
        Ok(upgraded)
    }

    /// An error if nothing moves any more.
    fn check(&self, now: Instant, due: Instant) -> Result<(), Over> {
        if now > due && now - self.moved.max(due) > STUCK {
            return Err(Over("given up".to_owned()));
        }
        Ok(())
    }
}

/// Begins to connect, and waits for nothing. Closing such a socket takes no port from the next ones.
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
        // EINPROGRESS has no kind of its own.
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

/// The status code of an HTTP response.
fn status(bytes: &[u8]) -> String {
    let code = bytes.get(9..12).unwrap_or_default();
    format!("HTTP {}", String::from_utf8_lossy(code))
}

/// Whether a connection is over because the gateway did not let it in.
fn is_refused(why: &str) -> bool {
    matches!(why, "HTTP 429" | "HTTP 503")
        || why.ends_with(&ErrorKind::ConnectionRefused.to_string())
}

/// The code of an error, in either encoding.
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
