//! How a home keeps the devices of its users (rule [version]).
//!
//! A token belongs to the user who registered it last. Its owner is written before the user's devices. So whoever is asked
//! to push to a device can find out that somebody else has its token by now, and nothing has to be told to the earlier
//! user's home.

use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;

use super::Here;
use crate::{
    chat::Error,
    cluster::wire::question::{Answers, ListDevices, RemoveDevice, SetDevice, SetToken},
    model::{Device, Epoch, UserId, limits::DEVICES_MAX},
    protocol::DeviceItem,
    store::{TokenRow, Version},
};

impl Answers<ListDevices> for Here {
    async fn answer(&self, ListDevices { user }: ListDevices) -> Result<Vec<DeviceItem>, Error> {
        let item = |device: &Device| DeviceItem {
            device: device.id.clone(),
            provider: device.provider,
            content: device.content,
        };
        Ok(self.devices_of(&user).await?.iter().map(item).collect())
    }
}

impl Answers<SetDevice> for Here {
    async fn answer(&self, SetDevice { user, device }: SetDevice) -> Result<(), Error> {
        self.set_device(&user, device).await
    }
}

impl Answers<RemoveDevice> for Here {
    async fn answer(&self, RemoveDevice { user, device }: RemoveDevice) -> Result<(), Error> {
        let is_removed = |known: &Device| known.id == device;
        self.remove_devices(&user, is_removed, true).await
    }
}

impl Answers<SetToken> for Here {
    /// Makes a device the owner of a token, or removes it as the owner, as the only gateway that writes this.
    async fn answer(
        &self,
        SetToken {
            hash,
            user,
            device,
            claims,
        }: SetToken,
    ) -> Result<(), Error> {
        let only = self.home.devices.lock_token(&hash).await;
        let epoch = self.responsible_since(|ring| ring.token(&hash)).await?;
        let stored = self.store.device_token(&hash).await?;
        let owner = stored.as_ref();
        // Somebody else may have registered it since.
        if !claims && !owner.is_some_and(|row| row.is_of(&user, &device)) {
            return Ok(());
        }
        let newest = stored.map_or(0, |row| row.version);
        self.conversations.check_above(newest, epoch)?;
        let version = self.next_version(epoch)?;
        let store = self.store.clone();
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
        self.written(epoch, written).await
    }
}

impl Here {
    /// Returns the devices of a user.
    pub(crate) async fn devices_of(&self, user: &UserId) -> Result<Arc<[Device]>, Error> {
        let epoch = self.at_home(user).await?;
        if let Some(known) = self.remembered(user) {
            return Ok(known);
        }
        let _only = self.home.devices.lock_user(user).await;
        self.read_devices(user, epoch).await
    }

    async fn set_device(&self, user: &UserId, mut device: Device) -> Result<(), Error> {
        let only = self.home.devices.lock_user(user).await;
        let epoch = self.at_home(user).await?;
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
    pub(crate) async fn remove_devices(
        &self,
        user: &UserId,
        is_removed: impl Fn(&Device) -> bool,
        for_good: bool,
    ) -> Result<(), Error> {
        let only = self.home.devices.lock_user(user).await;
        let epoch = self.at_home(user).await?;
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
    pub(crate) fn remembered(&self, user: &UserId) -> Option<Arc<[Device]>> {
        self.home.devices.of(user).filter(|_| self.may_serve())
    }

    /// Reads the devices of a user, and remembers them. The caller holds the lock of the user.
    async fn read_devices(&self, user: &UserId, epoch: Epoch) -> Result<Arc<[Device]>, Error> {
        if let Some(known) = self.remembered(user) {
            return Ok(known);
        }
        let stored = self.store.devices(user).await?;
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
        let (store, home, user) = (self.store.clone(), self.home.clone(), user.clone());
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
    async fn ask_token(&self, user: &UserId, device: &Device, claims: bool) -> Result<(), Error> {
        let hash = device.token_hash();
        let question = |_| SetToken {
            hash,
            user: user.clone(),
            device: device.id.clone(),
            claims,
        };
        let here = |question: SetToken| self.answer(question);
        self.gateways
            .ask(|ring| ring.token(&hash), question, here)
            .await
    }
}
