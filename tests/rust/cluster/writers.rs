//! Simulates the writers of devices, tokens and settings, and what homes know of the sessions of users, while gateways
//! crash, pause, leave, join and are cut off (rule [version]). At a quiet point:
//!
//! 1. what was acknowledged last is there, through each gateway, unless a later request may have changed it;
//! 2. versions of acknowledged settings rise;
//! 3. the token belongs to the user who registered it last;
//! 4. the home knows of each user whether all sessions are away.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use chat_gateway::{
    chat::Error,
    cluster::{Attention, Cluster, Users},
    fanout::Subscriber,
    model::{Device, PushContent, PushProvider, SessionId, SettingsChange},
    mutation::{Mutation, break_rule},
    protocol::{Codec, DeviceItem},
    store::{InboxRow, simulated::Faults},
};
use tokio::time::{Instant, sleep};

use super::{
    paused, setting,
    world::{Consuming, Gateway, USERS, World, create, spawn, user},
};
use crate::broken::{find, require};

/// Quiet points of one run.
const ROUNDS: usize = 3;
/// The time for which a request waits. A home that is paused may answer when another one has been the home.
const PATIENCE: Duration = Duration::from_secs(12);
/// A request whose outcome is unknown may still be carried out for this time.
const LATE: Duration = Duration::from_secs(15);
/// A time that never passes, from which on each setting has another one.
const FAR: i64 = 4_000_000_000_000;
const WHILE_LEAVING: &str = " while a gateway leaves, expected ";
/// The time within which every gateway has adopted a version of the ring, or ended.
const ADOPTED: Duration = Duration::from_secs(5);
/// The time for which homes are asked after a gateway has left.
const LEFT: Duration = Duration::from_millis(300);
/// Gateways that are there at once.
const GATEWAYS_MAX: usize = 5;
/// Changes of the ring during a check of one user, after which the user is not checked.
const RINGS_MAX: usize = 5;
/// The ids of each user's devices, and of the one with the token that goes from user to user.
const IDS: [&str; 4] = ["a", "b", "c", "d"];
const SHARED: &str = "shared";

/// What may be stored: the last acknowledged value, and those of requests since whose outcome is unknown.
struct Possible<T>(BTreeSet<T>);

impl<T: Ord> Possible<T> {
    fn asked(&mut self, value: T, acknowledged: bool) {
        if acknowledged {
            self.0.clear();
        }
        self.0.insert(value);
    }
}

#[derive(Default)]
struct Expected {
    /// The content of each device, `None` if it is removed.
    devices: BTreeMap<(usize, &'static str), Possible<Option<bool>>>,
    settings: BTreeMap<usize, Possible<i64>>,
    versions: BTreeMap<usize, u64>,
    /// The owner of the token that goes from user to user, `None` if nobody has it.
    token: Option<Possible<Option<usize>>>,
    /// The sessions of each user, each with whether it is away, and its gateway.
    sessions: BTreeMap<usize, BTreeMap<u64, (bool, Arc<Gateway>)>>,
    findings: Vec<String>,
    acknowledged: usize,
}

type Shared = Arc<Mutex<Expected>>;

fn device(id: &str, token: String, full: bool) -> Device {
    Device {
        id: id.into(),
        provider: PushProvider::Fcm,
        token,
        content: if full {
            PushContent::Full
        } else {
            PushContent::None
        },
        version: 0,
    }
}

/// Asks through some gateway. `None` if the outcome is unknown.
pub(super) async fn ask<
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
>(
    world: &World,
    ask: impl FnOnce(Arc<Cluster>) -> F,
) -> Option<T> {
    let gateway = world.some_gateway()?;
    let cluster = gateway.cluster()?;
    gateway.ask_within(PATIENCE, ask(cluster)).await?.ok()
}

/// Sets and removes some devices of a user, one after the other. The home writes the list of all of them each time.
async fn set_devices(
    world: Arc<World>,
    number: usize,
    ids: &'static [&'static str],
    expected: Shared,
) {
    for count in 0.. {
        sleep(world.millis(5, 700)).await;
        if !world.sending.load(Ordering::Relaxed) {
            continue;
        }
        let (id, full) = (ids[world.below(ids.len())], world.below(2) == 0);
        let set = (world.below(4) > 0).then_some(full);
        let done = ask(&world, |cluster| async move {
            match set {
                Some(full) => {
                    let device = device(id, format!("{number}-{id}-{count}"), full);
                    cluster.users.set_device(&user(number), device).await
                }
                None => {
                    let users = &cluster.users;
                    users.remove_device(&user(number), id.to_owned()).await
                }
            }
        });
        let done = done.await.is_some();
        note(&expected, done, |expected| {
            let key = (number, id);
            let possible = expected.devices.entry(key);
            let possible = possible.or_insert_with(|| Possible([None].into()));
            possible.asked(set, done);
        });
        if !done {
            sleep(LATE).await;
        }
    }
}

/// Sets how long a user mutes the group.
async fn set_settings(world: Arc<World>, number: usize, expected: Shared) {
    for count in 1.. {
        sleep(world.millis(5, 700)).await;
        if !world.sending.load(Ordering::Relaxed) {
            continue;
        }
        let (group, until) = (world.conversations[0], FAR + count);
        let set = ask(&world, |cluster| async move {
            let change = SettingsChange {
                muted_until: Some(until),
                push: None,
            };
            let users = &cluster.users;
            users.set_settings(&user(number), group, change).await
        });
        let set = set.await;
        note(&expected, set.is_some(), |expected| {
            let possible = expected.settings.entry(number);
            let possible = possible.or_insert_with(|| Possible([0].into()));
            possible.asked(until, set.is_some());
            let Some(set) = set else { return };
            let before = expected.versions.insert(number, set.version);
            if before.is_some_and(|before| before >= set.version) {
                let text = format!("user {number}: version {} after {before:?}", set.version);
                expected.findings.push(text);
            }
        });
        if set.is_none() {
            sleep(LATE).await;
        }
    }
}

/// Registers one token for one user after the other.
async fn move_token(world: Arc<World>, expected: Shared) {
    loop {
        sleep(world.millis(5, 700)).await;
        if !world.sending.load(Ordering::Relaxed) {
            continue;
        }
        let number = world.below(USERS);
        tracing::trace!(number, "the token is claimed");
        let done = ask(&world, |cluster| async move {
            let device = device(SHARED, SHARED.into(), true);
            cluster.users.set_device(&user(number), device).await
        });
        let done = done.await.is_some();
        tracing::trace!(number, done, "the token was claimed");
        note(&expected, done, |expected| {
            let nobody = || Possible([None].into());
            let possible = expected.token.get_or_insert_with(nobody);
            possible.asked(Some(number), done);
        });
        if !done {
            sleep(LATE).await;
        }
    }
}

fn note(expected: &Shared, done: bool, note: impl FnOnce(&mut Expected)) {
    let mut expected = expected.lock().unwrap();
    expected.acknowledged += usize::from(done);
    note(&mut expected);
}

/// One session after the other of a user, each of which is away now and then.
async fn live(world: Arc<World>, number: usize, first: u64, expected: Shared) {
    for session in (first..).step_by(100) {
        sleep(world.millis(10, 2_000)).await;
        let Some(gateway) = world.some_gateway() else {
            continue;
        };
        let Some(cluster) = gateway.cluster() else {
            continue;
        };
        let subscriber = Subscriber::new(SessionId(session), user(number), Codec::Json, 1 << 22);
        let subscriber = Arc::new(subscriber);
        let (there, registering) = (cluster.clone(), subscriber.clone());
        let registered = gateway.ask(async move {
            there.users.register(&registering).await?;
            there.channels.subscribe_own(&registering, &[]).await;
            Ok::<_, Error>(())
        });
        let registered = matches!(registered.await, Some(Ok(())));
        let note = |away: Option<bool>| {
            let mut expected = expected.lock().unwrap();
            let sessions = expected.sessions.entry(number).or_default();
            match away {
                Some(away) => sessions.insert(session, (away, gateway.clone())),
                None => sessions.remove(&session),
            };
        };
        let mut away = false;
        if registered {
            note(Some(away));
        }
        while registered && gateway.is_up() {
            sleep(world.millis(50, 3_000)).await;
            if !world.sending.load(Ordering::Relaxed) {
                continue;
            }
            match world.below(6) {
                0 => break,
                1..4 => {
                    away = !away;
                    let (users, session) = (cluster.users.clone(), subscriber.clone());
                    let set = async move { users.set_away(&session, away) };
                    if gateway.ask(set).await.is_none() {
                        break;
                    }
                    note(Some(away));
                }
                _ => {}
            }
        }
        note(None);
        let (users, leaving) = (cluster.users.clone(), subscriber.clone());
        gateway.tasks.spawn(async move { users.leave(&leaving) });
    }
}

/// Compares what is there with what is expected.
async fn check(world: &Arc<World>, expected: &Shared, round: usize) {
    check_leaving(world, expected, round).await;
    for number in 0..USERS {
        for _ in 0..RINGS_MAX {
            // Gateways are asked one after the other, so a home that moves meanwhile is counted twice, or not at all.
            let version = world.store.ring_version();
            sleep(ADOPTED).await;
            while has_ended_sessions(expected, number) {
                sleep(Duration::from_millis(200)).await;
            }
            let findings = check_user(world, expected, round, number).await;
            if world.store.ring_version() == version && !has_ended_sessions(expected, number) {
                expected.lock().unwrap().findings.extend(findings);
                break;
            }
        }
    }
}

/// Lets a gateway join and leave again. Then others become the homes of its users, whose sessions stay as they are, so each
/// home that answers must say the same all the time.
async fn check_leaving(world: &Arc<World>, expected: &Shared, round: usize) {
    if world.live() >= GATEWAYS_MAX {
        return;
    }
    let before = world.serving();
    let joined = world.start();
    sleep(2 * ADOPTED).await;
    if !joined.is_up() {
        return;
    }
    let version = world.store.ring_version();
    world.let_leave(&joined);
    let leaving = Instant::now() + ADOPTED;
    while world.store.ring_version() == version && Instant::now() < leaving {
        sleep(Duration::from_millis(1)).await;
    }
    let (left, mut findings) = (Instant::now() + LEFT, Vec::new());
    while Instant::now() < left {
        sleep(Duration::from_millis(1)).await;
        for (number, gateway) in (0..USERS).flat_map(|n| before.iter().map(move |g| (n, g))) {
            let Some(cluster) = gateway.cluster() else {
                continue;
            };
            let asked = gateway.ask(async move { attention(&cluster.users, number).await });
            let Some(Some(Some(attention))) = asked.await else {
                continue;
            };
            let should = expected_attention(&expected.lock().unwrap(), number);
            if attention != should {
                let which = format!("round {round}, user {number}, gateway {}", gateway.number);
                findings.push(format!("{which}: {attention:?}{WHILE_LEAVING}{should:?}"));
            }
        }
    }
    // A gateway whose store answers too seldom leaves the ring also now, and takes its sessions with it.
    let is_quiet = (0..USERS).all(|number| !has_ended_sessions(expected, number));
    if is_quiet && before.iter().all(|gateway| gateway.is_up()) {
        expected.lock().unwrap().findings.append(&mut findings);
    }
}

/// Returns the attention of a user if this gateway is the user's home. `None` if the store did not answer.
async fn attention(users: &Users, number: usize) -> Option<Option<Attention>> {
    match users.devices_of(&user(number)).await {
        Ok(_) => {
            let attention = users.attention(&user(number)).0;
            // It may have adopted another ring before that.
            let is_home = users.devices_of(&user(number)).await.is_ok();
            is_home.then_some(Some(attention))
        }
        Err(Error::Moved) => Some(None),
        Err(_) => None,
    }
}

/// Whether a user has a session that has ended with its gateway, and has not noticed that yet.
fn has_ended_sessions(expected: &Shared, number: usize) -> bool {
    let expected = expected.lock().unwrap();
    let mut sessions = expected.sessions.get(&number).into_iter().flatten();
    sessions.any(|(_, (_, gateway))| !gateway.is_up())
}

/// Compares what there is of one user. Returns what is wrong.
async fn check_user(
    world: &Arc<World>,
    expected: &Shared,
    round: usize,
    number: usize,
) -> Vec<String> {
    let mut findings = Vec::new();
    let mut found = |text: String| findings.push(format!("round {round}, user {number}: {text}"));
    let mut homes = 0;
    let (group, serving) = (world.conversations[0], world.serving());
    for gateway in &serving {
        let Some(cluster) = gateway.cluster() else {
            continue;
        };
        let seen = look_patiently(gateway, &cluster, number);
        let Some((devices, rows, attention, owns)) = seen.await else {
            found(format!("gateway {} does not answer", gateway.number));
            continue;
        };
        let expected = expected.lock().unwrap();
        let mut wrong = Vec::new();
        for id in IDS {
            let is = devices.iter().find(|device| device.device == id);
            let is = is.map(|device| device.content == PushContent::Full);
            let may = expected.devices.get(&(number, id));
            if may.map_or(is.is_some(), |may| !may.0.contains(&is)) {
                wrong.push(format!(
                    "device {id} is {is:?}, expected {:?}",
                    may.map(|m| &m.0)
                ));
            }
        }
        let row = rows.iter().find(|row| row.conversation == group);
        let until = row.and_then(|row| row.settings.muted_until).unwrap_or(0);
        let may = expected.settings.get(&number);
        if may.is_some_and(|may| !may.0.contains(&until)) {
            wrong.push(format!(
                "muted until {until}, expected {:?}",
                may.map(|m| &m.0)
            ));
        }
        let may = expected.token.as_ref().map(|may| &may.0);
        if let Some(may) = may
            && ((owns && !may.contains(&Some(number)))
                || (!owns && may.len() == 1 && may.contains(&Some(number))))
        {
            wrong.push(format!("owns the token: {owns}, expected {may:?}"));
        }
        if let Some(attention) = attention {
            homes += 1;
            let should = expected_attention(&expected, number);
            if attention != should {
                wrong.push(format!("{attention:?}, expected {should:?}"));
            }
        }
        drop(expected);
        wrong.into_iter().for_each(&mut found);
    }
    if homes != 1 {
        found(format!("{homes} homes"));
    }
    // A gateway whose store answers too seldom leaves the ring also now, and takes its sessions with it.
    findings.retain(|_| serving.iter().all(|gateway| gateway.is_up()));
    findings
}

async fn look_patiently(gateway: &Gateway, cluster: &Arc<Cluster>, number: usize) -> Option<Look> {
    for _ in 0..20 {
        let seen = look(gateway, cluster.clone(), number).await;
        if seen.is_some() {
            return seen;
        }
        sleep(Duration::from_millis(200)).await;
    }
    None
}

fn expected_attention(expected: &Expected, number: usize) -> Attention {
    let sessions = expected.sessions.get(&number);
    let mut sessions = sessions.into_iter().flatten().map(|(_, (away, _))| *away);
    let is_away = sessions.clone().all(|away| away);
    match (sessions.next().is_some(), is_away) {
        (false, _) => Attention::None,
        (true, true) => Attention::Away,
        (true, false) => Attention::Present,
    }
}

type Look = (Vec<DeviceItem>, Vec<InboxRow>, Option<Attention>, bool);

/// Reads everything of a user through one gateway. `None` if the store did not answer.
async fn look(gateway: &Gateway, cluster: Arc<Cluster>, number: usize) -> Option<Look> {
    let looked = gateway.ask(async move {
        let (users, user) = (&cluster.users, user(number));
        let devices = users.devices(&user).await.ok()?;
        let rows = users.inbox_rows(&user).await.ok()?;
        let attention = attention(users, number).await?;
        let hash = device(SHARED, SHARED.into(), true).token_hash();
        let owns = users.token_is_of(&hash, &user, SHARED).await.ok()?;
        Some((devices, rows, attention, owns))
    });
    looked.await?
}

/// Runs one seed. Returns the findings and the number of acknowledged requests.
async fn run(seed: u64) -> (Vec<String>, usize) {
    let nothing = Consuming::default();
    let world = World::new(seed, Faults::BAD_DAY, false, false, None, nothing);
    for _ in 0..3 {
        world.start();
    }
    create(&world).await;
    let expected = Shared::default();
    for number in 0..USERS {
        for ids in IDS.chunks(2) {
            spawn(set_devices(world.clone(), number, ids, expected.clone()));
        }
        spawn(set_settings(world.clone(), number, expected.clone()));
        for session in 0..2 {
            let first = 1 + number as u64 * 10 + session;
            spawn(live(world.clone(), number, first, expected.clone()));
        }
    }
    spawn(move_token(world.clone(), expected.clone()));
    spawn(world.clone().churn());
    for round in 0..ROUNDS {
        world.sending.store(true, Ordering::Relaxed);
        world.churning.store(true, Ordering::Relaxed);
        sleep(world.millis(5_000, 40_000)).await;
        world.churning.store(false, Ordering::Relaxed);
        sleep(world.millis(0, 3_000)).await;
        world.sending.store(false, Ordering::Relaxed);
        // As in `run`: gateways that were paused or removed notice it, and are replaced.
        sleep(Duration::from_secs(12)).await;
        while world.live() < 3 {
            world.start();
        }
        sleep(Duration::from_secs(25)).await;
        check(&world, &expected, round).await;
    }
    let mut expected = expected.lock().unwrap();
    (
        std::mem::take(&mut expected.findings),
        expected.acknowledged,
    )
}

#[test]
fn rows_without_a_seq_have_one_writer() {
    let (from, seeds) = (setting("CLUSTER_FROM", 0), setting("CLUSTER_SEEDS", 50));
    let mut acknowledged = 0;
    for seed in from..from + seeds {
        let (findings, done) = paused(seed, run(seed));
        acknowledged += done;
        assert!(findings.is_empty(), "seed {seed}: {findings:#?}");
    }
    println!("{seeds} seeds, {acknowledged} requests acknowledged");
    assert!(acknowledged as u64 > seeds * 50, "{acknowledged}");
}

/// Requires that a seed finds a broken rule, and that what it finds is one of these kinds.
fn require_found(rule: Mutation, from: u64, kinds: &[&str]) {
    let from = setting("CLUSTER_FROM", from);
    let seeds = from..from + setting("CLUSTER_SEEDS", 500);
    require([find(rule, seeds, kinds, |seed, is_broken| {
        break_rule(is_broken.then_some(rule));
        let (findings, _) = paused(seed, run(seed));
        break_rule(None);
        findings
    })]);
}

#[test]
fn a_writer_that_does_not_check_that_it_is_one_is_found() {
    let kinds = ["device ", "muted until ", "owns the token: "];
    // Few seeds find it: a gateway that is no longer a home mostly knows that.
    require_found(Mutation::Version, 700, &kinds);
}

#[test]
fn a_home_that_answers_before_it_knows_its_sessions_is_found() {
    require_found(Mutation::Hold, 0, &[WHILE_LEAVING]);
}
