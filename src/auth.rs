//! Tokens, which identify clients: JWT, with keys and algorithms from the configuration, never from the token.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use jsonwebtoken::{
    Algorithm as JwtAlgorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header,
    encode, errors::ErrorKind,
};
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, Instant};

use crate::{
    clock,
    config::{Algorithm, Auth, Config, Key},
    model::{Millis, UserId},
    private,
};

/// The `role` of a back end.
const SERVICE: &str = "service";

/// The file in the data directory with the key of development tokens.
const DEVELOPMENT_KEY_FILE: &str = "development.key";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: UserId,
    /// The claims of a back end, which uses only the HTTP interface, and there may act for any user.
    pub service: Option<Box<Service>>,
    pub expires_at: Millis,
}

impl Identity {
    /// Returns when the token expires, on the monotonic clock.
    #[must_use]
    pub fn expires(&self) -> Instant {
        const FAR: u64 = 365 * 86_400_000;
        let left_ms = u64::try_from(self.expires_at - clock::wall()).unwrap_or_default();
        Instant::now() + Duration::from_millis(left_ms.min(FAR))
    }
}

/// The claims of a token with `role: service` besides its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The claim `scope`: names separated by spaces (RFC 8693). Without it, the service may do nothing.
    pub scope: String,
    /// The id of the token (`jti`), for the log.
    pub token: Option<String>,
    /// The `kid` of the key that verified the token.
    pub key: Option<String>,
    /// Whether that key may sign for services.
    pub trusted: bool,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TokenError {
    #[error("the token has expired")]
    Expired,
    #[error("the token is not accepted: {0}")]
    Rejected(String),
}

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error(
        "auth.keys has no HS256 secret to sign this token with; for a service it must be among auth.service_keys"
    )]
    NoSecret,
    #[error(
        "{0} does not exist, so no gateway that uses this directory has started yet, and none would accept the token. Run \
         the command where the gateway runs, or with its settings: --config, or CHAT__STORE__EMBEDDED__PATH"
    )]
    NoDevelopmentKey(PathBuf),
    #[error("signing failed: {0}")]
    Signing(String),
}

/// The claims that are read here. The library checks the others.
#[derive(Deserialize)]
struct Claims {
    sub: String,
    /// Seconds since 1970, possibly with a fraction (RFC 7519, NumericDate).
    exp: f64,
    #[serde(default)]
    role: Option<String>,
    #[serde(default)]
    scope: Option<String>,
    #[serde(default)]
    jti: Option<String>,
}

#[derive(Serialize)]
struct NewClaims<'a> {
    sub: &'a str,
    exp: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jti: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    iss: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aud: Option<&'a str>,
}

struct Verifier {
    kid: Option<String>,
    algorithm: JwtAlgorithm,
    key: DecodingKey,
}

struct Signer {
    kid: Option<String>,
    key: EncodingKey,
}

/// The verifier of tokens. In development it also signs them.
pub struct Tokens {
    verifiers: Vec<Verifier>,
    validation: Validation,
    leeway_s: u64,
    signing: Vec<Signer>,
    service_keys: Vec<String>,
    issuer: Option<String>,
    audience: Option<String>,
    development: bool,
}

impl Tokens {
    /// Reads the configured keys. Makes the key of development tokens if it is needed and missing.
    ///
    /// # Errors
    /// [`KeyError::File`] if a key file is missing or has no key of its algorithm.
    pub fn new(config: &Config) -> Result<Self, KeyError> {
        if config.auth.development {
            make_development_key(&config.store.embedded.path)?;
        }
        Self::existing(config)
    }

    /// Reads the configured keys.
    ///
    /// # Errors
    /// [`KeyError::File`] if a key file is missing or has no key of its algorithm, and [`KeyError::NoDevelopmentKey`] if no
    /// gateway has made the key of development tokens.
    pub fn existing(config: &Config) -> Result<Self, KeyError> {
        let Auth {
            development,
            keys,
            service_keys,
            issuer,
            audience,
            leeway_s,
        } = &config.auth;
        let mut validation = Validation {
            leeway: *leeway_s,
            ..Validation::default()
        };
        validation.set_required_spec_claims(&["exp", "sub"]);
        validation.validate_nbf = true;
        match audience {
            Some(audience) => validation.set_audience(&[audience]),
            None => validation.validate_aud = false,
        }
        if let Some(issuer) = issuer {
            validation.set_issuer(&[issuer]);
            validation.required_spec_claims.insert("iss".into());
        }
        if audience.is_some() {
            validation.required_spec_claims.insert("aud".into());
        }
        let (verifiers, signing) = if *development {
            let secret = development_key(&config.store.embedded.path)?;
            let verifier = Verifier {
                kid: None,
                algorithm: JwtAlgorithm::HS256,
                key: DecodingKey::from_secret(&secret),
            };
            (vec![verifier], vec![Signer::new(None, &secret)])
        } else {
            let verifiers = keys.iter().map(Verifier::new).collect::<Result<_, _>>()?;
            let signer = |key: &Key| {
                let secret = key.secret.as_ref()?;
                Some(Signer::new(key.kid.clone(), secret.as_bytes()))
            };
            (verifiers, keys.iter().filter_map(signer).collect())
        };
        Ok(Self {
            verifiers,
            validation,
            leeway_s: *leeway_s,
            signing,
            service_keys: service_keys.clone(),
            issuer: issuer.clone(),
            audience: audience.clone(),
            development: *development,
        })
    }

    /// Returns whether anyone on this machine may get a token for any user.
    #[must_use]
    pub fn development(&self) -> bool {
        self.development
    }

    /// Checks a token and returns its identity.
    ///
    /// # Errors
    /// The reason why the token is rejected. [`TokenError::Expired`] only if nothing else is wrong with it.
    pub fn check(&self, token: &str) -> Result<Identity, TokenError> {
        let rejected = |e: jsonwebtoken::errors::Error| match e.kind() {
            ErrorKind::ExpiredSignature => TokenError::Expired,
            kind => TokenError::Rejected(in_words(kind)),
        };
        let header = decode_header(token).map_err(rejected)?;
        let mut error = TokenError::Rejected("no key fits its algorithm and kid".into());
        for verifier in self.verifiers.iter().filter(|v| v.fits(&header)) {
            let mut validation = self.validation.clone();
            validation.algorithms = vec![verifier.algorithm];
            match decode::<Claims>(token, &verifier.key, &validation) {
                Ok(token) => return self.identity(token.claims, verifier),
                Err(e) => error = rejected(e),
            }
        }
        Err(error)
    }

    /// Checks the token of a user, and refuses that of a back end. Sessions take only these: they know no scopes and write
    /// no audit log.
    ///
    /// # Errors
    /// As [`Self::check`], and [`TokenError::Rejected`] for a token with `role: service`.
    pub fn check_user(&self, token: &str) -> Result<Identity, TokenError> {
        let identity = self.check(token)?;
        if identity.service.is_some() {
            let reason = "its role is service, and back ends use HTTP";
            return Err(TokenError::Rejected(reason.into()));
        }
        Ok(identity)
    }

    fn identity(&self, claims: Claims, verifier: &Verifier) -> Result<Identity, TokenError> {
        let user =
            UserId::new(&claims.sub).map_err(|e| TokenError::Rejected(format!("its sub: {e}")))?;
        let service = (claims.role.as_deref() == Some(SERVICE)).then(|| {
            Box::new(Service {
                scope: claims.scope.unwrap_or_default(),
                token: claims.jti,
                key: verifier.kid.clone(),
                trusted: self.may_sign_for_services(verifier.kid.as_ref()),
            })
        });
        // The conversion saturates for extreme times.
        let expires_at = ((claims.exp + self.leeway_s as f64) * 1000.0) as Millis;
        Ok(Identity {
            user,
            service,
            expires_at,
        })
    }

    fn may_sign_for_services(&self, kid: Option<&String>) -> bool {
        self.service_keys.is_empty() || kid.is_some_and(|kid| self.service_keys.contains(kid))
    }

    /// Signs a token for `user`, valid for `ttl_s` seconds. With `scope` it is a service's token, limited to these
    /// scopes.
    ///
    /// # Errors
    /// [`KeyError::NoSecret`] if no secret may sign it. Tokens for public keys are signed elsewhere, with the private
    /// key.
    pub fn sign(&self, user: &UserId, scope: Option<&str>, ttl_s: u64) -> Result<String, KeyError> {
        let fits = |s: &&Signer| scope.is_none() || self.may_sign_for_services(s.kid.as_ref());
        let signer = self.signing.iter().find(fits).ok_or(KeyError::NoSecret)?;
        let now = u64::try_from(clock::wall() / 1000).unwrap_or_default();
        let claims = NewClaims {
            sub: user.as_str(),
            exp: now.saturating_add(ttl_s),
            role: scope.map(|_| SERVICE),
            scope,
            jti: scope.map(|_| uuid::Uuid::now_v7().to_string()),
            iss: self.issuer.as_deref(),
            aud: self.audience.as_deref(),
        };
        let header = Header {
            kid: signer.kid.clone(),
            ..Header::new(JwtAlgorithm::HS256)
        };
        encode(&header, &claims, &signer.key).map_err(|e| KeyError::Signing(e.to_string()))
    }
}

/// Says what is wrong with a token. The library names its own types and variants.
fn in_words(kind: &ErrorKind) -> String {
    match kind {
        ErrorKind::InvalidToken => "it is no JSON Web Token".into(),
        ErrorKind::InvalidSignature => "its signature does not fit the key".into(),
        ErrorKind::InvalidIssuer => "its iss is not that of auth.issuer".into(),
        ErrorKind::InvalidAudience => "its aud is not that of auth.audience".into(),
        ErrorKind::ImmatureSignature => "its nbf is in the future".into(),
        ErrorKind::MissingRequiredClaim(claim) => format!("it has no {claim}"),
        ErrorKind::InvalidClaimFormat(claim) => format!("its {claim} has a wrong type"),
        ErrorKind::Json(error) => {
            let text = error.to_string();
            let missing = text.strip_prefix("missing field `");
            match missing.and_then(|text| text.split('`').next()) {
                Some(claim) => format!("it has no {claim}"),
                None => "its header or a claim cannot be read".into(),
            }
        }
        ErrorKind::Base64(_) | ErrorKind::Utf8(_) => "its parts are not base64url of JSON".into(),
        _ => "its header or signature cannot be used".into(),
    }
}

impl Signer {
    fn new(kid: Option<String>, secret: &[u8]) -> Self {
        let key = EncodingKey::from_secret(secret);
        Self { kid, key }
    }
}

impl Verifier {
    fn new(key: &Key) -> Result<Self, KeyError> {
        let algorithm = match key.algorithm {
            Algorithm::HS256 => JwtAlgorithm::HS256,
            Algorithm::RS256 => JwtAlgorithm::RS256,
            Algorithm::ES256 => JwtAlgorithm::ES256,
            Algorithm::EdDSA => JwtAlgorithm::EdDSA,
        };
        let kid = key.kid.clone();
        if let Some(secret) = &key.secret {
            let key = DecodingKey::from_secret(secret.as_bytes());
            return Ok(Self {
                kid,
                algorithm,
                key,
            });
        }
        let path = key.public_key_file.clone().unwrap_or_default();
        let failed = |reason: String| KeyError::File {
            path: path.clone(),
            reason,
        };
        let pem = fs::read(&path).map_err(|e| failed(e.to_string()))?;
        let decoding = match key.algorithm {
            Algorithm::RS256 => DecodingKey::from_rsa_pem(&pem),
            Algorithm::ES256 => DecodingKey::from_ec_pem(&pem),
            Algorithm::EdDSA | Algorithm::HS256 => DecodingKey::from_ed_pem(&pem),
        };
        let decoding =
            decoding.map_err(|e| failed(format!("not an {:?} public key: {e}", key.algorithm)))?;
        Ok(Self {
            kid,
            algorithm,
            key: decoding,
        })
    }

    fn fits(&self, header: &Header) -> bool {
        let kid = header.kid.is_none() || self.kid.is_none() || header.kid == self.kid;
        header.alg == self.algorithm && kid
    }
}

/// Returns the key of development tokens.
fn development_key(data: &Path) -> Result<Vec<u8>, KeyError> {
    let path = data.join(DEVELOPMENT_KEY_FILE);
    let stored = fs::read(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => KeyError::NoDevelopmentKey(path.clone()),
        _ => KeyError::File {
            path: path.clone(),
            reason: e.to_string(),
        },
    })?;
    if stored.len() < 32 {
        let reason = "the key is damaged; remove the file to generate a new one".into();
        return Err(KeyError::File { path, reason });
    }
    Ok(stored)
}

/// Generates the key of development tokens, unless there is one.
fn make_development_key(data: &Path) -> Result<(), KeyError> {
    let path = data.join(DEVELOPMENT_KEY_FILE);
    let failed = |e: std::io::Error| KeyError::File {
        path: path.clone(),
        reason: e.to_string(),
    };
    if path.exists() {
        private::restrict(&path);
        return Ok(());
    }
    fs::create_dir_all(data).map_err(failed)?;
    let key: [u8; 32] = rand::random();
    let text: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    // The file is complete before it gets its name, so that gateways that start at once all find the same key.
    let new = data.join(format!(".{DEVELOPMENT_KEY_FILE}-{}", std::process::id()));
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .map_err(failed)?;
    let named = file
        .write_all(text.as_bytes())
        .and_then(|()| fs::hard_link(&new, &path));
    drop(fs::remove_file(&new));
    match named {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}
