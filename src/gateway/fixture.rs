//! A gateway for unit tests: alone, over a simulated store.

use std::sync::Arc;

use super::{Eraser, Gateway};
use crate::{
    auth::Tokens,
    chat::Conversations,
    cluster::{Cluster, MembershipAgent},
    config::Config,
    fanout::Hub,
    store::Store,
    tasks::Tasks,
};

/// Makes a gateway over a store that nobody else uses.
pub(super) async fn gateway(config: &Config, store: Arc<dyn Store>) -> Gateway {
    let tasks = Tasks::default();
    let members = Arc::new(MembershipAgent::alone(store.clone()).await.unwrap());
    let hub = Arc::new(Hub::new(tasks.clone()));
    let cluster = Cluster::new(
        &members,
        &store,
        &hub,
        None,
        config.conversations().operation_timeout,
        config.memory(),
        &tasks,
        |publish, inbox, lease| {
            let (me, store) = (members.me(), store.clone());
            let settings = config.conversations();
            Conversations::new(me, store, publish, inbox, lease, settings, tasks.clone())
        },
    );
    let kept = members.clone();
    tasks.spawn_until_drained(async move { kept.keep().await });
    let tokens = Tokens::new(config).unwrap();
    let files = (None, Eraser::new().0);
    Gateway::new(config, &cluster, hub, tokens, tasks, files, None)
}
