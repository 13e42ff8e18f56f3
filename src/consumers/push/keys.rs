//! The keys with which the gateway proves to push services who it is. They are in files and in no setting, and no debug
//! text shows them.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde::{Deserialize, Serialize};

use super::Settings;

/// An error in a key file.
#[derive(Debug, thiserror::Error)]
#[error("{setting} = {path:?}: {reason}")]
pub struct KeyError {
    setting: &'static str,
    path: PathBuf,
    reason: String,
}

/// The keys of the providers that have settings.
#[derive(Debug, Default)]
pub struct Keys {
    pub(super) web: Option<SigningKey>,
    pub(super) fcm: Option<ServiceAccount>,
    pub(super) apns: Option<SigningKey>,
}

impl Keys {
    /// Reads the key files.
    ///
    /// # Errors
    /// [`KeyError`] if one cannot be read or has no key of its kind.
    pub fn read(settings: &Settings) -> Result<Self, KeyError> {
        const WEB_HINT: &str = "Generate one with: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out \
                                push.pem";
        let web = settings.web.as_ref().map(|web| {
            let key = read("push.web.key_file", &web.key_file, SigningKey::parse);
            key.map_err(|error| error.with_hint(WEB_HINT))
        });
        let fcm = settings
            .fcm
            .as_ref()
            .map(|fcm| read("push.fcm.key_file", &fcm.key_file, ServiceAccount::parse));
        let apns = settings.apns.as_ref().map(|apns| {
            let key = read("push.apns.key_file", &apns.key_file, SigningKey::parse);
            key.map_err(|error| error.with_hint("Download one from your Apple developer account"))
        });
        Ok(Self {
            web: web.transpose()?,
            fcm: fcm.transpose()?,
            apns: apns.transpose()?,
        })
    }
}

impl KeyError {
    fn with_hint(mut self, hint: &str) -> Self {
        self.reason = format!("{}. {hint}", self.reason);
        self
    }
}

fn read<K>(
    setting: &'static str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<K, String>,
) -> Result<K, KeyError> {
    let text = fs::read(path).map_err(|error| error.to_string());
    text.and_then(|text| parse(&text))
        .map_err(|reason| KeyError {
            setting,
            path: path.to_owned(),
            reason,
        })
}

/// A private key on the curve P-256, which signs tokens with ES256.
pub(super) struct SigningKey {
    key: EncodingKey,
    public: Vec<u8>,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey")
    }
}

impl SigningKey {
    /// Reads a PEM text with a key in PKCS #8 form.
    pub(super) fn parse(pem: &[u8]) -> Result<Self, String> {
        let wrong = "not a private key on the curve P-256 in a PEM file (PKCS #8)";
        let key = EncodingKey::from_ec_pem(pem).map_err(|_| wrong)?;
        // The library would accept a key on another curve here, and refuse to sign later.
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.as_bytes())
            .map_err(|_| wrong)?;
        let public = pair.public_key().as_ref().to_vec();
        Ok(Self { key, public })
    }

    /// Returns the public key: 65 bytes, a point that is not compressed.
    pub(super) fn public(&self) -> &[u8] {
        &self.public
    }

    /// Signs a token.
    pub(super) fn sign(
        &self,
        kid: Option<&str>,
        claims: &impl Serialize,
    ) -> Result<String, Unsigned> {
        sign(Algorithm::ES256, kid, claims, &self.key)
    }
}

/// A token could not be signed. A key that was checked can fail only if the machine has no random numbers.
#[derive(Debug)]
pub(super) struct Unsigned;

fn sign(
    algorithm: Algorithm,
    kid: Option<&str>,
    claims: &impl Serialize,
    key: &EncodingKey,
) -> Result<String, Unsigned> {
    let header = Header {
        kid: kid.map(str::to_owned),
        ..Header::new(algorithm)
    };
    encode(&header, claims, key).map_err(|_| Unsigned)
}

/// A service account of Google, from the JSON file that its console makes.
pub(super) struct ServiceAccount {
    pub(super) project: String,
    pub(super) email: String,
    /// The address that gives access tokens.
    pub(super) token_uri: String,
    key_id: Option<String>,
    key: EncodingKey,
}

impl fmt::Debug for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceAccount")
            .field("project", &self.project)
            .field("email", &self.email)
            .finish_non_exhaustive()
    }
}

/// The fields of the JSON file that are used.
#[derive(Deserialize)]
struct AccountFile {
    project_id: String,
    private_key_id: Option<String>,
    private_key: String,
    client_email: String,
    token_uri: String,
}

impl ServiceAccount {
    /// Reads the JSON file of a service account.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        // The library's error text could quote the file.
        let file: AccountFile = serde_json::from_slice(json).map_err(|error| {
            format!(
                "not the JSON file of a service account with project_id, private_key, client_email and token_uri \
                 (line {})",
                error.line()
            )
        })?;
        let in_path = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        if file.project_id.is_empty() || !file.project_id.bytes().all(in_path) {
            return Err("project_id is not the id of a project".into());
        }
        if !file.token_uri.starts_with("https://") {
            return Err("token_uri does not begin with https://".into());
        }
        let wrong = "private_key is not an RSA key in PEM form";
        let key = EncodingKey::from_rsa_pem(file.private_key.as_bytes()).map_err(|_| wrong)?;
        let account = Self {
            project: file.project_id,
            email: file.client_email,
            token_uri: file.token_uri,
            key_id: file.private_key_id,
            key,
        };
        // The library checks the key only when it signs.
        account.sign(&()).map_err(|Unsigned| wrong)?;
        Ok(account)
    }

    /// Signs a token with RS256.
    pub(super) fn sign(&self, claims: &impl Serialize) -> Result<String, Unsigned> {
        sign(Algorithm::RS256, self.key_id.as_deref(), claims, &self.key)
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};

    use super::*;
    use crate::consumers::push::{
        WebSettings,
        fixtures::{account_json, p256_pem, p384_pem, rsa_pem},
    };

    #[test]
    fn keys_are_checked_when_they_are_read() {
        let key = SigningKey::parse(p256_pem().as_bytes()).unwrap();
        let token = key.sign(None, &()).unwrap();
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let signature = crate::consumers::push::web::base64(signature).unwrap();
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key.public())
            .verify(signed.as_bytes(), &signature)
            .unwrap();
        let named = p256_pem().replace("PRIVATE", "PUBLIC");
        for wrong in [&p384_pem(), &rsa_pem(), &named, "no key", ""] {
            assert!(SigningKey::parse(wrong.as_bytes()).is_err());
        }
    }

    #[test]
    fn a_service_account_is_checked_and_not_shown() {
        let rsa = rsa_pem();
        let file = |change: fn(&mut serde_json::Value)| {
            let mut json = account_json(&rsa);
            change(&mut json);
            ServiceAccount::parse(json.to_string().as_bytes())
        };
        let account = file(|_| {}).unwrap();
        assert!(!format!("{account:?}").contains("KEY"));
        for (error, part) in [
            (file(|json| json["project_id"] = "a/b".into()), "project_id"),
            (file(|json| json["token_uri"] = "http://a".into()), "https"),
            (file(|json| json["private_key"] = p256_pem().into()), "RSA"),
            (
                file(|json| drop(json.as_object_mut().unwrap().remove("private_key"))),
                "private_key",
            ),
            (ServiceAccount::parse(rsa.as_bytes()), "line 1"),
        ] {
            let error = error.unwrap_err();
            assert!(error.contains(part) && !error.contains("MII"), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_setting_the_file_and_what_to_do() {
        let settings = Settings {
            web: Some(WebSettings {
                key_file: "/nowhere/push.pem".into(),
                contact: "mailto:a@example.org".into(),
                hosts: Vec::new(),
            }),
            ..Settings::default()
        };
        let error = Keys::read(&settings).unwrap_err().to_string();
        for part in ["push.web.key_file", "/nowhere/push.pem", "openssl genpkey"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
