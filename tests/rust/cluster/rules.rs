//! The rules that are broken on purpose, and what the checker finds then.

use chat_gateway::mutation::Mutation;

use super::{Broken, Scene, setting, simulate, world::ClientRule};
use crate::broken::{find, require};

/// Seeds that are tried for one rule.
const SEEDS_MAX: u64 = 2_000;

const MESSAGES: Scene = Scene {
    evicting: false,
    changing: false,
    webhook: false,
    pushing: false,
};
const CHANGES: Scene = Scene {
    changing: true,
    ..MESSAGES
};
const EVICTED_CHANGES: Scene = Scene {
    evicting: true,
    ..CHANGES
};
/// Broken rules of webhooks show sooner without the work of pushing.
const WEBHOOKS: Scene = Scene {
    pushing: false,
    ..Scene::WHOLE
};

// What is found.
const TWICE: &str = "a client id is in the log twice";
const HISTORY: &str = ": the history has ";
const OTHER_ACKNOWLEDGED: &str = "acknowledged at";
const OTHER_ENTRY: &str = ", now ";
const CLIENT_LACKS: &str = "messages of conversation";
const INBOX_SEQ: &str = "the inbox of user";
const PLACES: &str = "the visitor's home remembers";
const SECRET: &str = "the visitor saw message";
const CLIENT_SHOWS: &str = " shows ";
const UNREAD: &str = " unread after ";
const NOT_ARRIVED: &str = "not all arrived at the receiver";
const OUT_OF_ORDER: &str = " arrived after ";
const JUMPED: &str = "live events jumped from ";
const NOT_PUSHED: &str = " was not pushed";
const NOTIFIED: &str = "a notification that nobody should get";

/// Two owners at once: what one of them acknowledged, published or stored is not so for the other one.
const OF_TWO_OWNERS: &[&str] = &[
    OTHER_ACKNOWLEDGED,
    OTHER_ENTRY,
    TWICE,
    HISTORY,
    CLIENT_LACKS,
    INBOX_SEQ,
    PLACES,
    JUMPED,
];

fn find_in(scene: Scene, broken: Broken, from: u64, kinds: &[&str]) -> Result<(), String> {
    let from = setting("CLUSTER_FROM", from);
    let seeds = from..from + setting("CLUSTER_SEEDS", SEEDS_MAX);
    let run = |seed, is_broken| {
        let broken = if is_broken { broken } else { Broken::Nothing };
        simulate(seed, scene, broken).findings
    };
    match broken {
        Broken::Nothing => Ok(()),
        Broken::Rule(rule) => find(rule, seeds, kinds, run),
        Broken::OfClients(rule) => find(rule, seeds, kinds, run),
    }
}

#[test]
fn each_broken_rule_of_the_cluster_is_found() {
    // `simulation.rs` finds the rules of the log sooner. Some rules here show in one seed of thousands, so each begins at
    // a seed shortly before one that finds it. A change of the code can move those seeds.
    let rules: [(Mutation, u64, &[&str]); 10] = [
        (Mutation::Lease, 0, OF_TWO_OWNERS),
        (Mutation::TakeoverWait, 120, OF_TWO_OWNERS),
        (Mutation::Hold, 20, &[CLIENT_LACKS, JUMPED]),
        (Mutation::RingFirst, 0, &[JUMPED]),
        // A removal, too, is acknowledged before the sessions of the user have ended.
        (Mutation::EndToEnd, 2_000, &[CLIENT_LACKS, SECRET, JUMPED]),
        // Nobody is told of an addition, or of a removal.
        (Mutation::Place, 5_500, &[PLACES, SECRET]),
        (Mutation::Remember, 0, &[PLACES, INBOX_SEQ]),
        (Mutation::Private, 110, &[SECRET]),
        (Mutation::Asking, 2_300, &[SECRET]),
        (Mutation::Removed, 110, &[SECRET]),
    ];
    require(rules.map(|(rule, from, kinds)| find_in(MESSAGES, Broken::Rule(rule), from, kinds)));
}

#[test]
fn each_broken_rule_of_changes_is_found() {
    let of_clients: [(ClientRule, &[&str]); 3] = [
        (ClientRule::Gap, &[CLIENT_SHOWS]),
        (ClientRule::PageRev, &[CLIENT_SHOWS]),
        (ClientRule::Resume, &[CLIENT_SHOWS]),
    ];
    let rules: [(Mutation, &[&str]); 3] = [
        (Mutation::InboxCorrection, &[INBOX_SEQ]),
        (Mutation::ReadTexts, &[UNREAD]),
        (Mutation::ChangePublish, &[CLIENT_SHOWS]),
    ];
    let of_clients = of_clients
        .into_iter()
        .map(|(rule, kinds)| find_in(CHANGES, Broken::OfClients(rule), 0, kinds));
    let rules = rules
        .into_iter()
        .map(|(rule, kinds)| find_in(EVICTED_CHANGES, Broken::Rule(rule), 0, kinds));
    require(of_clients.chain(rules));
}

#[test]
fn each_broken_rule_of_consumers_is_found() {
    let rules: [(Scene, Mutation, u64, &[&str]); 7] = [
        (
            WEBHOOKS,
            Mutation::ConsumerFirst,
            0,
            &[NOT_ARRIVED, OUT_OF_ORDER],
        ),
        (WEBHOOKS, Mutation::ConsumerFound, 0, &[NOT_ARRIVED]),
        (WEBHOOKS, Mutation::ConsumerClose, 0, &[NOT_ARRIVED]),
        (
            WEBHOOKS,
            Mutation::ConsumerOffset,
            0,
            &[NOT_ARRIVED, OUT_OF_ORDER],
        ),
        (WEBHOOKS, Mutation::ConsumerOrder, 0, &[OUT_OF_ORDER]),
        (Scene::WHOLE, Mutation::PushOffset, 0, &[NOT_PUSHED]),
        (Scene::WHOLE, Mutation::FaceDeleted, 101_900, &[NOTIFIED]),
    ];
    let found = |(scene, rule, from, kinds): (_, _, _, &[&str])| {
        find_in(scene, Broken::Rule(rule), from, kinds)
    };
    require(rules.map(found));
}
