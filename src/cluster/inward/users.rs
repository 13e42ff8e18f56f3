//! What is asked about users. Most is asked of their homes: sessions, inboxes, presence, settings, uploads, devices,
//! notifications. `disconnect` asks all gateways. What pushing needs is asked of this gateway, as the home.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{gateways::Gateways, here::Here, router::Router};
use crate::{
    chat::Error,
    cluster::{
        home::{attention::Attention, pushes::Pushes},
        wire::{
            link::CallError,
            message::{PeerMessage, encode},
            question::{
                BeginUpload, Disconnect, InboxOrder, InboxRef, ListDevices, OrderInbox, Position,
                Push, ReadInbox, ReadPresence, Register, RemoveDevice, SetDevice, SetSettings,
                ToNotify, Watch,
            },
        },
    },
    fanout::Subscriber,
    model::{
        ConversationId, Device, GatewayId, SettingsChange, Topic, UploadBegun, UploadLimits,
        UserId,
        limits::{HEADS_AT_ONCE, WATCHED_MAX},
    },
    mutation::{Mutation, broken},
    protocol::{DeviceItem, PresenceItem},
    store::{self, InboxRow, InboxSettings, Version},
};

/// The time within which a home answers who is to be notified. It is asked again in any case.
const PUSH_ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// The users, through their homes.
pub struct Users {
    pub(super) router: Arc<Router>,
}

impl Users {
    pub(crate) fn new(router: Arc<Router>) -> Self {
        Self { router }
    }

    pub(super) fn gateways(&self) -> &Gateways {
        &self.router.gateways
    }

    pub(super) fn here(&self) -> &Here {
        &self.router.here
    }

    // Sessions.

    /// Subscribes a session to its user, at the user's home, and reads which conversations the user is in. Everything that
    /// is published from then on reaches the session: rule [register].
    ///
    /// # Errors
    /// `Unavailable` if the home does not answer in time.
    pub async fn register(&self, session: &Arc<Subscriber>) -> Result<Vec<InboxRef>, Error> {
        let user = &session.user;
        self.here()
            .sockets
            .subscribe(&Topic::User(user.clone()), session);
        let ask = |version| Register {
            user: user.clone(),
            version,
        };
        self.router.ask_home(user, ask).await
    }

    /// Ends all subscriptions of a session.
    pub fn leave(&self, session: &Subscriber) {
        let tell_away = |away| self.tell_away(&session.user, away);
        self.here()
            .sockets
            .leave(session, |topic| self.router.uninterested(topic), tell_away);
    }

    /// Notes whether the user of a session does not look at it. The user's home learns it if that changes something for all
    /// sessions here.
    pub fn set_away(&self, session: &Subscriber, away: bool) {
        let tell = |away| self.tell_away(&session.user, away);
        self.here().sockets.set_away(session, away, tell);
    }

    /// Tells the home of a user whether all sessions of the user here are away. If this is lost with a link, the interests
    /// that are announced for the next version of the ring say it again.
    fn tell_away(&self, user: &UserId, away: bool) {
        let gateways = self.gateways();
        match (gateways.ring.load().home(user), &gateways.others) {
            (Some(home), Some(others)) if home != gateways.me => {
                let user = user.clone();
                let told = PeerMessage::Away { user, away };
                others.peers.send(home, encode(&told), None);
            }
            _ => self.here().home.presence.away(user, gateways.me, away),
        }
    }

    /// Returns whether a user looks, as their home, and for how long, at least, that has been so.
    #[must_use]
    pub fn attention(&self, user: &UserId) -> (Attention, Duration) {
        self.here().home.presence.attention(user)
    }

    /// Closes all sessions of a user on all gateways. Returns their number.
    ///
    /// # Errors
    /// `Unavailable` if a gateway does not answer in time.
    pub async fn disconnect(&self, user: &UserId) -> Result<usize, Error> {
        let gateways = self.gateways();
        let mut closed = self.here().sockets.disconnect(user);
        if let Some(others) = &gateways.others {
            let ring = gateways.ring.load_full();
            let members = ring.members().iter().filter(|&&g| g != gateways.me);
            let asks = members.map(|&gateway| {
                let user = user.clone();
                others.peers.ask(gateway, Disconnect { user })
            });
            let answers = gateways.in_time(async { Ok(join_all(asks).await) });
            for answer in answers.await? {
                match answer {
                    Ok(there) => closed += there?,
                    // The gateway is gone, and with it its sessions.
                    Err(CallError::Lost) => {}
                    Err(unasked) => return Err(unasked.into()),
                }
            }
        }
        Ok(closed)
    }

    // Inboxes. Their pages are in another file, because they need the owners of channels too.

    /// Reads all conversations of a user, as they are stored and as they were published since.
    ///
    /// # Errors
    /// `Unavailable` if the store cannot be read, or the user's home does not answer in time.
    pub async fn inbox_rows(&self, user: &UserId) -> Result<Vec<InboxRow>, Error> {
        self.ask_rows(user, None).await
    }

    /// Reads the rows of some conversations of a user, or of all.
    ///
    /// # Errors
    /// Those of [`Self::inbox_rows`].
    pub async fn ask_rows(
        &self,
        user: &UserId,
        some: Option<Vec<ConversationId>>,
    ) -> Result<Vec<InboxRow>, Error> {
        let ask = |_| ReadInbox {
            user: user.clone(),
            some: some.clone(),
        };
        self.router.ask_home(user, ask).await
    }

    /// Reads the conversations from which the page of an inbox before a position is chosen.
    pub(super) async fn ask_order(
        &self,
        user: &UserId,
        before: Option<Position>,
        limit: usize,
    ) -> Result<InboxOrder, Error> {
        let ask = |_| OrderInbox {
            user: user.clone(),
            before,
            limit,
        };
        self.router.ask_home(user, ask).await
    }

    // Presence.

    /// Reads whether each user is online, and subscribes the session to changes of that.
    ///
    /// # Errors
    /// `TooLarge` if the session would watch too many users; `Unavailable` if the store cannot be read, or a user's home
    /// does not answer in time. Then nothing has changed.
    pub async fn watch(
        &self,
        session: &Arc<Subscriber>,
        users: &[UserId],
    ) -> Result<Vec<PresenceItem>, Error> {
        let topics: Vec<Topic> = users.iter().cloned().map(Topic::Presence).collect();
        let what = "users that a session watches";
        self.here()
            .sockets
            .request(&topics, session, what, WATCHED_MAX)?;
        let mut items = Vec::with_capacity(users.len());
        for users in users.chunks(HEADS_AT_ONCE) {
            items.extend(join_all(users.iter().map(|user| self.watch_one(user))).await);
        }
        let items: Result<Vec<_>, Error> = items.into_iter().collect();
        match items {
            Ok(items) if self.here().sockets.hub().confirm(&topics, session) => Ok(items),
            Ok(_) => Err(Error::unavailable("unwatched meanwhile")),
            Err(error) => {
                self.router.give_up(session, &topics);
                Err(error)
            }
        }
    }

    async fn watch_one(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |version| Watch {
            user: user.clone(),
            version,
        };
        self.router.ask_home(user, ask).await
    }

    /// Reads whether a user is online.
    ///
    /// # Errors
    /// `Unavailable` if the store cannot be read, or the user's home does not answer in time.
    pub async fn presence(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |_| ReadPresence { user: user.clone() };
        self.router.ask_home(user, ask).await
    }

    /// Stores the times at which users were last seen. It must be called every few seconds.
    pub async fn flush_presence(&self) {
        self.here().home.presence.flush().await;
    }

    // Settings and uploads.

    /// Sets what a user wants of a conversation. Returns the settings afterwards. All sessions of the user are told.
    ///
    /// # Errors
    /// `UnknownConversation` if the user is not in it; `Unavailable` if the outcome is unknown.
    pub async fn set_settings(
        &self,
        user: &UserId,
        conversation: ConversationId,
        change: SettingsChange,
    ) -> Result<InboxSettings, Error> {
        let ask = |_| SetSettings {
            user: user.clone(),
            conversation,
            change,
        };
        self.router.ask_home(user, ask).await
    }

    /// Counts an upload of so many bytes that a user begins.
    ///
    /// # Errors
    /// `Unavailable` if the user's home does not answer in time. The upload may be counted.
    pub async fn begin_upload(
        &self,
        user: &UserId,
        bytes: u64,
        limits: UploadLimits,
    ) -> Result<UploadBegun, Error> {
        if broken(Mutation::UploadHome) {
            return self.here().count_upload(user, bytes, limits).await;
        }
        let ask = |_| BeginUpload {
            user: user.clone(),
            bytes,
            limits,
        };
        self.router.ask_home(user, ask).await
    }

    // Devices.

    /// Registers a device of a user, or replaces the one with this id.
    ///
    /// # Errors
    /// `TooLarge` if the user has too many devices; `Unavailable` if the outcome is unknown.
    pub async fn set_device(&self, user: &UserId, device: Device) -> Result<(), Error> {
        let ask = |_| SetDevice {
            user: user.clone(),
            device: device.clone(),
        };
        self.router.ask_home(user, ask).await
    }

    /// Removes a device of a user. It is no error if there is none.
    ///
    /// # Errors
    /// `Unavailable` if the outcome is unknown.
    pub async fn remove_device(&self, user: &UserId, device: String) -> Result<(), Error> {
        let ask = |_| RemoveDevice {
            user: user.clone(),
            device: device.clone(),
        };
        self.router.ask_home(user, ask).await
    }

    /// Lists the devices of a user.
    ///
    /// # Errors
    /// `Unavailable` if the user's home does not answer in time.
    pub async fn devices(&self, user: &UserId) -> Result<Vec<DeviceItem>, Error> {
        let ask = |_| ListDevices { user: user.clone() };
        self.router.ask_home(user, ask).await
    }

    // What pushing needs, at the user's home.

    /// Sets who decides, as the home of users, whether they are notified.
    pub fn on_push(&self, pushes: &Arc<dyn Pushes>) {
        self.here().home.presence.on_push(pushes);
    }

    /// Returns the devices of a user, as their home.
    ///
    /// # Errors
    /// `Moved` if this is not the user's home; `Unavailable` if the store cannot be read.
    pub async fn devices_of(&self, user: &UserId) -> Result<Arc<[Device]>, Error> {
        self.here().devices_of(user).await
    }

    /// Returns whether it is known, without a read, that a user has no devices.
    #[must_use]
    pub fn has_no_devices(&self, user: &UserId) -> bool {
        let known = self.here().remembered(user);
        known.is_some_and(|devices| devices.is_empty())
    }

    /// Returns whether a token still belongs to this device of the user. If not, another user has registered it since, or
    /// this one under another id.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn token_is_of(
        &self,
        hash: &[u8; 32],
        user: &UserId,
        device: &str,
    ) -> store::Result<bool> {
        let owner = self.here().store.device_token(hash).await?;
        Ok(owner.is_some_and(|row| row.is_of(user, device)))
    }

    /// Removes a device that is gone, as the user's home, unless it has been registered again: then its version is higher
    /// than that of the device to which something was sent.
    ///
    /// # Errors
    /// `Moved` if this is not the user's home; `Unavailable` if the outcome is unknown.
    pub async fn forget_device(
        &self,
        user: &UserId,
        device: &str,
        version: Version,
    ) -> Result<(), Error> {
        let gone = |known: &Device| known.id == device && known.version <= version;
        self.here().remove_devices(user, gone, false).await
    }

    // What the owners of conversations ask homes.

    /// Asks the homes of these users to notify them. Returns those for whom nothing is decided yet. Nothing is repeated here.
    pub async fn ask_push(&self, conversation: ConversationId, users: ToNotify) -> Vec<UserId> {
        let (gateways, here) = (self.gateways(), self.here());
        let Some(others) = &gateways.others else {
            return here.decide(conversation, users);
        };
        let ring = gateways.ring.load_full();
        let mut undecided = Vec::new();
        let mut homes: BTreeMap<GatewayId, ToNotify> = BTreeMap::new();
        for (user, seq) in users {
            match ring.home(&user) {
                Some(home) => homes.entry(home).or_default().push((user, seq)),
                None => undecided.push(user),
            }
        }
        let asked = homes.into_iter().map(|(home, users)| async move {
            if home == gateways.me {
                return here.decide(conversation, users);
            }
            let all = users.iter().map(|(user, _)| user.clone()).collect();
            let ask = Push {
                conversation,
                users,
            };
            match timeout(PUSH_ANSWERED_WITHIN, others.peers.ask(home, ask)).await {
                Ok(Ok(Ok(undecided))) => undecided,
                _ => all,
            }
        });
        undecided.extend(join_all(asked).await.into_iter().flatten());
        undecided
    }
}
