//! The devices of users: what sessions request of the homes of users, and how a home keeps them (rule [version]).
//!
//! A token belongs to the user who registered it last. Its owner is written before the user's devices. So whoever is asked
//! to push to a device can find out that somebody else has its token by now, and nothing has to be told to the earlier
//! user's home.

use std::{future::ready, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::sync::OwnedMutexGuard;

use super::{
    home::AtHome,
    message::{DevicesAsk, PeerRequest, PeerResponse},
    router::Router,
    view::View,
};
use crate::{
    chat::{Error, Outcome},
    model::{Device, Epoch, GatewayId, LEVEL_CONSUMERS, UserId, limits::DEVICES_MAX},
    mutation::{Mutation, broken},
    protocol::DeviceItem,
    store::{self, TokenRow, Version},
};

impl Router {
    /// Registers a device of a user, or replaces the one with this id.
    ///
    /// # Errors
    /// `TooLarge` if the user has too many devices; `Unavailable` if the outcome is unknown, or below the level of
    /// consumers.
    pub async fn set_device(&self, user: &UserId, device: Device) -> Result<(), Error> {
        self.change_devices(user, DevicesAsk::Set(device)).await
    }

    /// Removes a device of a user. It is no error if there is none.
    ///
    /// # Errors
    /// `Unavailable` if the outcome is unknown, or below the level of consumers.
    pub async fn remove_device(&self, user: &UserId, device: String) -> Result<(), Error> {
        self.change_devices(user, DevicesAsk::Remove { device })
            .await
    }

    async fn change_devices(&self, user: &UserId, ask: DevicesAsk) -> Result<(), Error> {
        match self.ask_devices(user, ask).await? {
            PeerResponse::Outcome(outcome) => outcome.map(drop),
            _ => Err(Error::Closed),
        }
    }

    /// Lists the devices of a user.
    ///
    /// # Errors
    /// `Unavailable` if the user's home does not answer in time, or below the level of consumers.
    pub async fn devices(&self, user: &UserId) -> Result<Vec<DeviceItem>, Error> {
        match self.ask_devices(user, DevicesAsk::List).await? {
            PeerResponse::Devices(devices) => Ok(devices),
            PeerResponse::Outcome(Err(error)) => Err(error),
            _ => Err(Error::Closed),
        }
    }

    async fn ask_devices(&self, user: &UserId, ask: DevicesAsk) -> Result<PeerResponse, Error> {
        self.check_consumers_level()?;
        let ask = |_| PeerRequest::Devices {
            user: user.clone(),
            ask: ask.clone(),
        };
        self.ask_home(user, ask).await
    }

    /// Gateways of earlier levels know neither the requests nor the rows of consumers.
    pub(super) fn check_consumers_level(&self) -> Result<(), Error> {
        if self.level() < LEVEL_CONSUMERS {
            return Err(Error::NOT_UPGRADED);
        }
        Ok(())
    }

    // What pushing needs, at the user's home.

    /// Returns the devices of a user, as their home.
    ///
    /// # Errors
    /// `Moved` if this is not the user's home; `Unavailable` if the store cannot be read.
    pub async fn devices_of(&self, user: &UserId) -> Result<Arc<[Device]>, Error> {
        let epoch = self.at_home_since(user).await?;
        if let Some(known) = self.remembered(user) {
            return Ok(known);
        }
        let _only = self.home.devices.lock_user(user).await;
        self.read_devices(user, epoch).await
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
        let owner = self.store().device_token(hash).await?;
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
        self.remove_devices(user, gone, false).await
    }

    // A user's home.

    /// Answers what is asked about the devices of a user.
    pub(super) async fn devices_here(
        &self,
        user: &UserId,
        ask: DevicesAsk,
    ) -> Result<PeerResponse, Error> {
        match ask {
            DevicesAsk::List => {
                let item = |device: &Device| DeviceItem {
                    device: device.id.clone(),
                    provider: device.provider,
                    content: device.content,
                };
                let devices = self.devices_of(user).await?;
                return Ok(PeerResponse::Devices(devices.iter().map(item).collect()));
            }
            DevicesAsk::Set(device) => self.set_device_here(user, device).await?,
            DevicesAsk::Remove { device } => {
                self.remove_devices(user, |known| known.id == device, true)
                    .await?;
            }
        }
        Ok(PeerResponse::Outcome(Ok(Outcome::Done)))
    }

    async fn set_device_here(&self, user: &UserId, mut device: Device) -> Result<(), Error> {
        let only = self.home.devices.lock_user(user).await;
        let epoch = self.at_home_since(user).await?;
        let known = self.read_devices(user, epoch).await?;
        // The same token under another id is the same device.
        let is_replaced = |known: &Device| known.id == device.id || known.token == device.token;
        let (replaced, mut devices): (Vec<_>, Vec<_>) =
            known.iter().cloned().partition(is_replaced);
        if devices.len() >= DEVICES_MAX {
            return Err(Error::TooLarge {
                what: "devices of a user".into(),
                max: DEVICES_MAX,
            });
        }
        self.ask_token(user, &device, true).await?;
        let version = self.next_version(epoch)?;
        device.version = version;
        let token = device.token.clone();
        devices.push(device);
        self.write_devices(only, user, epoch, version, devices)
            .await?;
        let unused = replaced.iter().filter(|known| known.token != token);
        self.release_tokens(user, unused).await;
        Ok(())
    }

    /// Removes devices. `for_good`: also those that a write of unknown outcome may have left on a replica that was not read. It
    /// could come back, so the list is written although it does not change.
    async fn remove_devices(
        &self,
        user: &UserId,
        is_removed: impl Fn(&Device) -> bool,
        for_good: bool,
    ) -> Result<(), Error> {
        let only = self.home.devices.lock_user(user).await;
        let epoch = self.at_home_since(user).await?;
        let known = self.read_devices(user, epoch).await?;
        let (removed, stay): (Vec<_>, Vec<_>) = known.iter().cloned().partition(is_removed);
        if removed.is_empty() && !for_good {
            return Ok(());
        }
        let version = self.next_version(epoch)?;
        self.write_devices(only, user, epoch, version, stay).await?;
        self.release_tokens(user, removed.iter()).await;
        Ok(())
    }

    /// Returns the devices that this gateway remembers. After a pause it may have missed that another one became the home.
    pub(super) fn remembered(&self, user: &UserId) -> Option<Arc<[Device]>> {
        self.home.devices.of(user).filter(|_| self.may_serve())
    }

    /// Reads the devices of a user, and remembers them. The caller holds the lock of the user.
    async fn read_devices(&self, user: &UserId, epoch: Epoch) -> Result<Arc<[Device]>, Error> {
        if let Some(known) = self.remembered(user) {
            return Ok(known);
        }
        let stored = self.store().devices(user).await?;
        let (newest, devices) = stored.unwrap_or_default();
        self.conversations.check_above(newest, epoch)?;
        let devices: Arc<[Device]> = devices.into();
        self.home.remember_devices(user, epoch, devices.clone());
        Ok(devices)
    }

    /// Writes the devices of a user. It is done to its end even if nobody waits for it: otherwise the next one could read
    /// what is there before it, and this would be written later.
    async fn write_devices(
        &self,
        only: OwnedMutexGuard<()>,
        user: &UserId,
        epoch: Epoch,
        version: Version,
        devices: Vec<Device>,
    ) -> Result<(), Error> {
        let (store, home, user) = (self.store().clone(), self.home.clone(), user.clone());
        // After an error, the store may have either.
        home.devices.forget(&user);
        let written = async move {
            let written = store.set_devices(&user, version, &devices).await;
            if written.is_ok() {
                home.remember_devices(&user, epoch, devices.into());
            }
            drop(only);
            written
        };
        self.written(epoch, written).await
    }

    /// Returns the version of a write under a version of the ring.
    pub(super) fn next_version(&self, epoch: Epoch) -> Result<Version, Error> {
        self.home.devices.versions.next(epoch).ok_or(Error::Moved)
    }

    /// Completes a write under rule [version]: it counts only if this gateway has been the writer all the time. Otherwise
    /// the next writer may have read what was there before, and so it is asked again.
    pub(super) async fn written(
        &self,
        epoch: Epoch,
        written: impl Future<Output = store::Result<()>> + Send + 'static,
    ) -> Result<(), Error> {
        match self.tasks.spawn(written).await {
            Ok(written) => written?,
            Err(_) => return Err(Error::BROKEN),
        }
        let is_writer = self.may_serve() && self.home.version() == epoch;
        if is_writer || broken(Mutation::Version) {
            Ok(())
        } else {
            Err(Error::Moved)
        }
    }

    /// Waits until this gateway may act as the user's home. Returns the version of the ring since which, at the latest.
    pub(super) async fn at_home_since(&self, user: &UserId) -> Result<Epoch, Error> {
        self.responsible_since(|ring| ring.home(user)).await
    }

    /// Waits until this gateway may act as the one that the ring names by `pick`: rule [confirm].
    async fn responsible_since(
        &self,
        pick: impl Fn(&View) -> Option<GatewayId>,
    ) -> Result<Epoch, Error> {
        let Some(others) = &self.others else {
            return Ok(self.home.version());
        };
        let attempt = || {
            let (at_home, version) = self.home.is_responsible(&pick);
            ready(match at_home {
                AtHome::Yes => Some(Ok(version)),
                AtHome::No => Some(Err(Error::Moved)),
                AtHome::NotYet => None,
            })
        };
        self.retry(others, attempt).await
    }

    // Tokens.

    /// Releases tokens that devices of the user no longer have. If that fails, rows stay that name devices without them.
    async fn release_tokens(&self, user: &UserId, devices: impl Iterator<Item = &Device>) {
        for device in devices {
            if let Err(error) = self.ask_token(user, device, false).await {
                tracing::debug!(%error, "a token was not released");
            }
        }
    }

    /// Asks the gateway of a token to make the user its owner, or to remove the user as its owner.
    ///
    /// The future is boxed, because the gateway may be this one, whose answer is the caller.
    fn ask_token<'a>(
        &'a self,
        user: &'a UserId,
        device: &'a Device,
        claims: bool,
    ) -> BoxFuture<'a, Result<(), Error>> {
        let hash = device.token_hash();
        let ask = move |_| PeerRequest::Token {
            hash,
            user: user.clone(),
            device: device.id.clone(),
            claims,
        };
        async move {
            match self.ask_responsible(|ring| ring.token(&hash), ask).await? {
                PeerResponse::Outcome(outcome) => outcome.map(drop),
                _ => Err(Error::Closed),
            }
        }
        .boxed()
    }

    /// Makes a device the owner of a token, or removes it as the owner, as the only gateway that writes this.
    pub(super) async fn token_here(
        &self,
        hash: [u8; 32],
        user: UserId,
        device: String,
        claims: bool,
    ) -> Result<Outcome, Error> {
        let only = self.home.devices.lock_token(&hash).await;
        let epoch = self.responsible_since(|ring| ring.token(&hash)).await?;
        let stored = self.store().device_token(&hash).await?;
        let owner = stored.as_ref();
        // Somebody else may have registered it since.
        if !claims && !owner.is_some_and(|row| row.is_of(&user, &device)) {
            return Ok(Outcome::Done);
        }
        let newest = stored.map_or(0, |row| row.version);
        self.conversations.check_above(newest, epoch)?;
        let version = self.next_version(epoch)?;
        let store = self.store().clone();
        let written = async move {
            let row = TokenRow {
                version,
                user,
                device,
            };
            let written = if claims {
                store.set_device_token(&hash, &row).await
            } else {
                store.remove_device_token(&hash, version).await
            };
            drop(only);
            written
        };
        self.written(epoch, written).await?;
        Ok(Outcome::Done)
    }
}
