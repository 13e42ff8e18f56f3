//! Hostile sessions, all in one thread of a separate process that is told when to begin and when to stop. Everything
//! they send is encoded beforehand, and each has a turn once per millisecond, so they take little CPU from the gateway:
//! a run measures the gateway, not its attackers. Each session does one kind of misuse after the other, and sessions
//! overlap.

mod session;

use std::{
    collections::BTreeMap,
    io::{self, BufRead, BufReader},
    sync::mpsc::{self, TryRecvError},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use session::Session;

use crate::abuse::attacks::{Hostile, KINDS, busy_writer};

/// The first input of the process, as one line of JSON.
#[derive(Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) hostiles: Vec<Hostile>,
    /// The session that writes to the busy channel.
    pub(crate) writer: Hostile,
    /// Milliseconds after which a session changes to the next kind of misuse.
    pub(crate) turn_ms: u64,
    /// The number of the only kind of misuse. `None` for all in turn.
    pub(crate) only: Option<usize>,
}

/// Input: all sessions begin, and continue until the next line. There is no answer.
pub(crate) const BEGIN: &str = "begin";
/// Input: all sessions stop and close their connections. The answer is `Done`, as one line of JSON.
pub(crate) const STOP: &str = "stop";
/// Input, after `STOP`: each session opens connections that the gateway must close. The answer is `Done`.
pub(crate) const LEAVE: &str = "leave";

/// What the sessions did since the process began.
#[derive(Serialize, Deserialize, Default)]
pub(crate) struct Done {
    pub(crate) sessions: Vec<Activity>,
    pub(crate) kinds: BTreeMap<String, Tally>,
    /// Longest time between two turns of a session. A long time means that this process was held up.
    pub(crate) turn_ms_max: u64,
}

/// What one session did.
#[derive(Serialize, Deserialize, Default, Clone)]
pub(crate) struct Activity {
    pub(crate) acts: u64,
    pub(crate) bytes: u64,
    /// Acts in the second with the fewest.
    pub(crate) least_per_second: u64,
    /// Longest time between two acts.
    pub(crate) idle_ms: u64,
}

/// What all sessions did of one kind of misuse.
#[derive(Serialize, Deserialize, Default, Clone)]
pub(crate) struct Tally {
    /// Pieces that were written completely, and connections that were left open on purpose.
    pub(crate) acts: u64,
    pub(crate) bytes: u64,
    /// Attempts to connect.
    pub(crate) connections: u64,
    /// Attempts that the gateway refused.
    pub(crate) refused: u64,
    /// Turns that ended while a `connect` waited for its answer, because its user was over the byte rate.
    pub(crate) held: u64,
    pub(crate) milliseconds: u64,
    /// How often connections ended in each way, and how often requests were refused with each code.
    pub(crate) outcomes: BTreeMap<String, u64>,
}

/// Time between two turns of a session.
const TICK: Duration = Duration::from_millis(1);
/// Bytes that a session reads at most in one turn.
const READ_BYTES: usize = 64 << 10;

/// Serves the hostile sessions until the input ends.
pub(crate) fn serve() -> anyhow::Result<()> {
    let mut lines = BufReader::new(io::stdin()).lines();
    let orders: Orders = serde_json::from_str(&lines.next().context("the input has no orders")??)?;
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let mut hostiles = Hostiles::new(orders);
    for line in &told {
        if line == LEAVE {
            hostiles.sessions.iter_mut().for_each(Session::leave);
        } else {
            hostiles.misbehave(|| told.try_recv() != Err(TryRecvError::Empty));
        }
        println!("{}", serde_json::to_string(&hostiles.done())?);
    }
    Ok(())
}

/// All sessions, and what they did since the process began.
struct Hostiles {
    sessions: Vec<Session>,
    writer: Session,
    kinds: Vec<Tally>,
    buffer: Vec<u8>,
    /// Time after which a session changes to the next kind of misuse.
    turn: Duration,
    turn_max: Duration,
    only: Option<usize>,
}

impl Hostiles {
    fn new(orders: Orders) -> Self {
        let only = orders.only;
        let count = orders.hostiles.len();
        let sessions = (0..)
            .zip(orders.hostiles)
            // Sessions begin with different kinds, so that all kinds overlap.
            .map(|(number, who)| {
                let kind = only.unwrap_or(number * KINDS.len() / count);
                Session::new(who, kind)
            });
        Self {
            sessions: sessions.collect(),
            writer: Session::new(orders.writer, 0),
            kinds: KINDS.iter().map(|_| Tally::default()).collect(),
            buffer: vec![0; READ_BYTES],
            turn: Duration::from_millis(orders.turn_ms),
            turn_max: Duration::ZERO,
            only,
        }
    }

    /// Gives each session a turn in every tick, until `over`.
    fn misbehave(&mut self, over: impl Fn() -> bool) {
        let Self {
            sessions,
            writer,
            kinds,
            buffer,
            ..
        } = self;
        for session in &mut *sessions {
            session.prepare();
        }
        writer.attack = busy_writer(&writer.who);
        let begin = Instant::now();
        for session in &mut *sessions {
            session.begin(begin, self.turn);
        }
        writer.restart(begin);
        let mut before = begin;
        while !over() {
            let now = Instant::now();
            self.turn_max = self.turn_max.max(now - before);
            before = now;
            for session in &mut *sessions {
                session.next_kind(now, self.turn, self.only, kinds);
                let kind = &mut kinds[session.kind];
                session.act(now, kind, buffer);
            }
            writer.act(now, &mut Tally::default(), buffer);
            sleep(TICK.saturating_sub(now.elapsed()));
        }
        for session in &mut *sessions {
            session.stop(Instant::now(), kinds);
        }
        writer.disconnect();
    }

    fn done(&self) -> Done {
        let names = KINDS.iter().map(|(name, _)| (*name).to_owned());
        Done {
            sessions: self.sessions.iter().map(Session::activity).collect(),
            kinds: names.zip(self.kinds.iter().cloned()).collect(),
            turn_ms_max: self.turn_max.as_millis() as u64,
        }
    }
}
