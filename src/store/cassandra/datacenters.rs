//! Checks at the start that the settings fit the cluster: the datacenter that a gateway uses, and the copies of the keyspace.

use std::collections::{BTreeMap, BTreeSet};

use scylla::{
    client::session::Session,
    statement::{Consistency, unprepared::Statement},
};

use super::{
    super::{Error, Result},
    schema::{EVERYWHERE, Keyspace, failed, rows},
};

const STRATEGY: &str = "NetworkTopologyStrategy";
/// The key of a keyspace's replication that names the class.
const CLASS: &str = "class";

/// What the settings say.
pub(super) struct Wanted<'a> {
    pub(super) keyspace: &'a Keyspace,
    pub(super) datacenter: Option<&'a str>,
    pub(super) consistency: Consistency,
}

/// Checks the datacenters of the cluster, and the keyspace if it exists. Returns the datacenter that the gateway uses.
///
/// # Errors
/// [`Error::Unusable`] with what is wrong, and [`Error::Unavailable`] if the cluster does not answer.
pub(super) async fn check(session: &Session, wanted: &Wanted<'_>) -> Result<String> {
    let state = session.get_cluster_state();
    let nodes = state.get_nodes_info().iter();
    let datacenters: Option<BTreeSet<String>> = nodes.map(|node| node.datacenter.clone()).collect();
    // The driver begins without them if the first node that it asks does not answer.
    let known = datacenters.filter(|known| !known.is_empty());
    let datacenters =
        known.ok_or_else(|| failed("the datacenters of the nodes are not known yet"))?;
    let unusable = |reason| Error::Unusable { reason };
    // Before anything is asked: the driver asks only nodes of the datacenter.
    let mine = datacenter(wanted.datacenter, &datacenters).map_err(unusable)?;
    let stored = replication(session, &wanted.keyspace.name).await?;
    let wrong = wrong(wanted, mine, &datacenters, stored.as_ref());
    wrong.map_or(Ok(mine.to_owned()), |reason| Err(unusable(reason)))
}

type Replication = BTreeMap<String, String>;

/// Returns the replication of a keyspace. `None` if there is none.
async fn replication(session: &Session, keyspace: &str) -> Result<Option<Replication>> {
    let text = "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = ?";
    let rows = rows(session, Statement::new(text), (keyspace,)).await?;
    let row = rows.maybe_first_row::<(Replication,)>().map_err(failed)?;
    Ok(row.map(|(replication,)| replication))
}

/// Warns if a node says that it acknowledges writes before they are on its disk. ScyllaDB does not say it.
pub(super) async fn tell_of_loss(session: &Session) {
    let text = "SELECT value FROM system_views.settings WHERE name = 'commitlog_sync'";
    let Ok(rows) = rows(session, Statement::new(text), ()).await else {
        return;
    };
    let value = rows.maybe_first_row::<(Option<String>,)>();
    if let Ok(Some((Some(value),))) = value
        && value == "periodic"
    {
        tracing::warn!(
            "commitlog_sync is periodic: if several nodes lose power at once, acknowledged messages are lost. Set it to batch \
             or group on each node"
        );
    }
}

/// Returns the datacenter that the gateway uses.
fn datacenter<'a>(
    named: Option<&'a str>,
    all: &'a BTreeSet<String>,
) -> std::result::Result<&'a str, String> {
    let listed = || all.iter().cloned().collect::<Vec<_>>().join(", ");
    match named {
        Some(mine) if all.contains(mine) => Ok(mine),
        Some(mine) => Err(format!(
            "store.cassandra.datacenter: the cluster has no {mine}, only {}",
            listed()
        )),
        None => match all.first() {
            Some(only) if all.len() == 1 => Ok(only),
            _ => Err(format!(
                "store.cassandra.datacenter: the cluster has several datacenters ({}). Name the one that all gateways use",
                listed()
            )),
        },
    }
}

/// Returns what is wrong with the copies, given all datacenters and the replication of the keyspace if it exists.
fn wrong(
    wanted: &Wanted<'_>,
    mine: &str,
    all: &BTreeSet<String>,
    stored: Option<&Replication>,
) -> Option<String> {
    match stored {
        None => wrong_new(wanted.keyspace, mine, all),
        Some(stored) => {
            let counts = wanted.consistency == Consistency::LocalQuorum || all.len() == 1;
            wrong_stored(wanted.keyspace, mine, counts, stored)
        }
    }
}

/// Returns what is wrong with the settings for a keyspace that will be made.
fn wrong_new(keyspace: &Keyspace, mine: &str, all: &BTreeSet<String>) -> Option<String> {
    let copies = &keyspace.replication;
    let is_unknown = |name: &&String| *name != EVERYWHERE && !all.contains(*name);
    if let Some(unknown) = copies.keys().find(is_unknown) {
        let reason = format!("the cluster has no datacenter {unknown}");
        return Some(format!("store.cassandra.replication: {reason}"));
    }
    let has_none = keyspace.copies(mine).is_none();
    has_none.then(|| format!("store.cassandra.replication: there are no copies in {mine}"))
}

/// Returns what is wrong with a keyspace that exists. Whether its copies in `mine` alone make a quorum is in `counts`.
fn wrong_stored(
    keyspace: &Keyspace,
    mine: &str,
    counts: bool,
    stored: &Replication,
) -> Option<String> {
    let name = &keyspace.name;
    let class = stored.get(CLASS).map_or("", String::as_str);
    if class.rsplit('.').next() != Some(STRATEGY) {
        return Some(format!(
            "keyspace {name} has the replication class {class}, and {STRATEGY} is needed. While no gateway runs: ALTER KEYSPACE, \
             and then a full repair on each node"
        ));
    }
    let here = stored.get(mine).and_then(|copies| copies.parse().ok());
    let here: u32 = here.unwrap_or(0);
    let least = keyspace.copies(mine).unwrap_or(1);
    (counts && here < least).then(|| {
        format!(
            "keyspace {name} has {here} copies in {mine}, and store.cassandra.replication says {least}. Change the setting, or \
             while no gateway runs: ALTER KEYSPACE, and then a full repair on each node. Gateways that start before the repair \
             has ended lose messages"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(
        datacenter: Option<&str>,
        copies: &[(&str, u32)],
        all: &[&str],
        stored: Option<&[(&str, &str)]>,
    ) -> String {
        let copies = copies.iter().map(|&(key, copies)| (key.into(), copies));
        let keyspace = Keyspace {
            name: "chat".into(),
            replication: copies.collect(),
        };
        let wanted = Wanted {
            keyspace: &keyspace,
            datacenter,
            consistency: Consistency::LocalQuorum,
        };
        let all = all.iter().map(|&name| name.into()).collect();
        let mine = match super::datacenter(datacenter, &all) {
            Ok(mine) => mine,
            Err(wrong) => return wrong,
        };
        let pair = |&(key, value): &(&str, &str)| (key.into(), value.into());
        let stored: Option<Replication> = stored.map(|s| s.iter().map(pair).collect());
        wrong(&wanted, mine, &all, stored.as_ref()).unwrap_or_default()
    }

    const THREE: [(&str, u32); 1] = [(EVERYWHERE, 3)];
    const NETWORK: (&str, &str) = (
        CLASS,
        "org.apache.cassandra.locator.NetworkTopologyStrategy",
    );
    const SIMPLE: (&str, &str) = (CLASS, "org.apache.cassandra.locator.SimpleStrategy");

    #[test]
    fn a_gateway_names_its_datacenter_if_there_are_several() {
        let stored = [NETWORK, ("dc1", "3"), ("dc2", "3")];
        let both = ["dc1", "dc2"];
        assert_eq!(found(None, &THREE, &["dc1"], Some(&stored)), "");
        assert_eq!(found(Some("dc2"), &THREE, &both, Some(&stored)), "");
        assert_eq!(found(Some("dc2"), &THREE, &both, None), "");
        let several = found(None, &THREE, &both, Some(&stored));
        assert!(
            several.contains("several datacenters (dc1, dc2)"),
            "{several}"
        );
        let unknown = found(Some("dc3"), &THREE, &both, Some(&stored));
        assert!(unknown.contains("no dc3, only dc1, dc2"), "{unknown}");
    }

    #[test]
    fn a_keyspace_has_as_many_copies_as_the_settings_say() {
        for (stored, part) in [
            (vec![SIMPLE, (EVERYWHERE, "3")], "SimpleStrategy"),
            (vec![NETWORK, ("dc1", "1")], "has 1 copies in dc1"),
            (vec![NETWORK, ("dc2", "3")], "has 0 copies in dc1"),
        ] {
            let text = found(None, &THREE, &["dc1"], Some(&stored));
            assert!(text.contains(part), "{text}");
        }
        let more = [NETWORK, ("dc1", "3")];
        assert_eq!(found(None, &[("dc1", 1)], &["dc1"], Some(&more)), "");
        let unknown = found(None, &[("dc3", 3)], &["dc1"], None);
        assert!(unknown.contains("no datacenter dc3"), "{unknown}");
        let elsewhere = found(Some("dc1"), &[("dc2", 3)], &["dc1", "dc2"], None);
        assert!(elsewhere.contains("no copies in dc1"), "{elsewhere}");
    }
}
