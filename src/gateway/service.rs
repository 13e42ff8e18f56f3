//! Back ends: authentication, scopes, and the audit log of everything that they do for users.

use std::{
    borrow::Cow,
    marker::PhantomData,
    str::FromStr,
    sync::{Arc, OnceLock},
};

use axum::{
    extract::{FromRequestParts, MatchedPath, RawPathParams, Request},
    http::{HeaderMap, HeaderValue, header, request::Parts},
    middleware::Next,
    response::Response,
};
use percent_encoding::percent_decode;
use tokio::time::Instant;

use super::{
    Gateway,
    address::forwarded,
    admission::SharedPlace,
    listener::Peer,
    rates,
    reply::{Acted, Said, refused, respond},
};
use crate::{
    auth,
    model::{AttachmentId, ConversationId, UserId},
    protocol::ErrorCode,
};

/// A scope that a token may name.
pub(super) trait Scope {
    const NAME: &'static str;
}

/// Defines the list of all scopes, and a type for each that a route names outside of the table of requests.
macro_rules! scopes {
    ($($(#[$doc:meta])* $($type:ident)? $name:literal),* $(,)?) => {
        $($(
            pub(super) struct $type;
            impl Scope for $type {
                const NAME: &'static str = $name;
            }
        )?)*
        /// All scopes that a service's token may have.
        pub const SCOPES: &[&str] = &[$($name),*];
    };
}

scopes! {
    /// Read inboxes, history, reactions and changes.
    MessagesRead "messages:read",
    /// Send, edit and delete messages, react to them, mark them as read or delivered.
    MessagesWrite "messages:write",
    /// Delete messages of anyone.
    MessagesModerate "messages:moderate",
    /// Read details, participants and public conversations.
    "conversations:read",
    /// Create and change conversations and their participants.
    "conversations:write",
    /// Read the presence of users.
    PresenceRead "presence:read",
    /// List the devices of users.
    DevicesRead "devices:read",
    /// Register and remove devices.
    DevicesWrite "devices:write",
    /// Close a user's connections.
    SessionsClose "sessions:close",
    /// Read the state of consumers, and what they skipped.
    ConsumersRead "consumers:read",
    /// Test, enable and disable consumers.
    ConsumersWrite "consumers:write",
}

/// A back end whose token has the scope `S`, and the user for whom it acts. A route without this extractor acts for
/// nobody.
pub(super) struct Service<S> {
    pub(super) acting: UserId,
    scope: PhantomData<S>,
}

/// The requester, once known. The audit log records it with the route's answer.
#[derive(Clone, Default)]
struct Record(Arc<OnceLock<Who>>);

struct Who {
    service: UserId,
    claims: auth::Service,
    acting: Option<UserId>,
    /// The scope that the route requires.
    scope: &'static str,
}

impl<S: Scope> FromRequestParts<Arc<Gateway>> for Service<S> {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let identity = identify(parts, gateway)?;
        Self::of(identity, parts, gateway)
    }
}

impl<S: Scope> Service<S> {
    #[expect(clippy::result_large_err, reason = "a response either way")]
    fn of(identity: auth::Identity, parts: &Parts, gateway: &Gateway) -> Result<Self, Response> {
        let acting = checked(identity, parts, gateway, S::NAME)?;
        let scope = PhantomData;
        Ok(Self { acting, scope })
    }
}

/// Returns the user for whom a back end acts whose token has this scope.
#[expect(clippy::result_large_err, reason = "a response either way")]
pub(super) fn admitted(
    parts: &Parts,
    gateway: &Gateway,
    scope: &'static str,
) -> Result<UserId, Response> {
    checked(identify(parts, gateway)?, parts, gateway, scope)
}

/// Checks what the owner of a valid token may do.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn checked(
    identity: auth::Identity,
    parts: &Parts,
    gateway: &Gateway,
    scope: &'static str,
) -> Result<UserId, Response> {
    let (service, claims) = admit(identity, parts, gateway)?;
    let acting = acting(&parts.headers, &service);
    if let Some(Record(record)) = parts.extensions.get() {
        let acting = acting.as_ref().ok().cloned();
        let claims = claims.clone();
        let _ = record.set(Who {
            service,
            claims,
            acting,
            scope,
        });
    }
    if !claims.trusted {
        let text = "the key of this token may not sign for services: see auth.service_keys";
        let refused = refused(ErrorCode::Forbidden, text);
        return Err(challenged(refused, INSUFFICIENT_SCOPE));
    }
    if !claims.scope.split(' ').any(|has| has == scope) {
        let text = format!("the token lacks the scope {scope}");
        let refused = refused(ErrorCode::Forbidden, text);
        let lacking = format!("{INSUFFICIENT_SCOPE}, scope=\"{scope}\"");
        return Err(challenged(refused, &lacking));
    }
    acting.map_err(|text| refused(ErrorCode::BadRequest, text))
}

/// A user with a token of their own, or a back end whose token has the scope `S` and that acts for a user.
pub(super) struct Person<S> {
    pub(super) acting: UserId,
    /// When the token expires.
    pub(super) expires_at: Instant,
    scope: PhantomData<S>,
}

impl<S: Scope> FromRequestParts<Arc<Gateway>> for Person<S> {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        gateway: &Arc<Gateway>,
    ) -> Result<Self, Response> {
        let identity = identify(parts, gateway)?;
        let expires_at = identity.expires();
        if identity.service.is_some() {
            let Service { acting, scope } = Service::<S>::of(identity, parts, gateway)?;
            return Ok(Self {
                acting,
                expires_at,
                scope,
            });
        }
        let rate = gateway.rates.of(&identity.user);
        let requested = gateway.rates.request(&rate);
        requested.map_err(|wait| respond(wait.refuse("too many requests")))?;
        Ok(Self {
            acting: identity.user,
            expires_at,
            scope: PhantomData,
        })
    }
}

/// Returns the client's address of a request.
pub(super) fn address(parts: &Parts, gateway: &Gateway) -> Option<std::net::IpAddr> {
    let peer = parts.extensions.get::<Peer>()?.address;
    let admission = &gateway.admission;
    Some(if admission.is_trusted_proxy(peer) {
        forwarded(&parts.headers, peer, admission.trusted_proxies())
    } else {
        peer
    })
}

pub(super) const INVALID_REQUEST: &str = ", error=\"invalid_request\"";
const INVALID_TOKEN: &str = ", error=\"invalid_token\"";
const INSUFFICIENT_SCOPE: &str = ", error=\"insufficient_scope\"";

/// Adds which token is needed (RFC 6750, section 3). `error` is nothing if the client sent none.
pub(super) fn challenged(mut response: Response, error: &str) -> Response {
    let challenge = HeaderValue::from_str(&format!("Bearer realm=\"chat\"{error}"));
    let challenge = challenge.map(|challenge| (header::WWW_AUTHENTICATE, challenge));
    response.headers_mut().extend(challenge);
    response
}

/// Returns the owner of a valid token. Rejected tokens count against the address.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn identify(parts: &Parts, gateway: &Gateway) -> Result<auth::Identity, Response> {
    let address = address(parts, gateway);
    let guessing = || address.is_some_and(|address| gateway.admission.is_guessing(address));
    const GUESSING: &str = "too many tokens from this address were not accepted";
    if guessing() {
        return Err(refused(ErrorCode::RateLimited, GUESSING));
    }
    let unauthorized = |error: &str, text: &str| {
        if let Some(address) = address {
            gateway.admission.wrong_token(address);
        }
        if guessing() {
            return refused(ErrorCode::RateLimited, GUESSING);
        }
        challenged(refused(ErrorCode::Unauthorized, text), error)
    };
    let mut sent = parts.headers.get_all(header::AUTHORIZATION).into_iter();
    let first = sent.next().and_then(|v| v.to_str().ok());
    if sent.next().is_some() {
        let text = "there is more than one header Authorization";
        let refused = refused(ErrorCode::BadRequest, text);
        return Err(challenged(refused, INVALID_REQUEST));
    }
    // The name of the scheme may have capitals.
    let token = first
        .and_then(|value| value.split_once(' '))
        .and_then(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer").then_some(token))
        .ok_or_else(|| unauthorized("", "a bearer token is missing"))?;
    let identity = gateway
        .tokens
        .check(token.trim())
        .map_err(|error| unauthorized(INVALID_TOKEN, &error.to_string()))?;
    if let Some(place) = parts.extensions.get::<SharedPlace>() {
        place.authenticated();
    }
    Ok(identity)
}

/// Returns the service that owns a token, if it is one and keeps to its rate.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn admit(
    identity: auth::Identity,
    parts: &Parts,
    gateway: &Gateway,
) -> Result<(UserId, auth::Service), Response> {
    let Some(claims) = identity.service else {
        // This counts for the address, not for a service that happens to have this name.
        if let Some(address) = address(parts, gateway) {
            gateway.admission.wrong_token(address);
        }
        let text = "only tokens with role service may use HTTP";
        let refused = refused(ErrorCode::Forbidden, text);
        return Err(challenged(refused, INSUFFICIENT_SCOPE));
    };
    let checked = gateway.services.check_key(&identity.user);
    checked.map_err(|e| respond(rates::wait(&e).refuse("too many requests of this service")))?;
    Ok((identity.user, *claims))
}

/// Returns the user in the header `chat-user` (percent-encoded UTF-8), or the token's own user without that header.
fn acting(headers: &HeaderMap, service: &UserId) -> Result<UserId, String> {
    let Some(value) = headers.get("chat-user") else {
        return Ok(service.clone());
    };
    let text = percent_decoded(value).ok_or("chat-user: it is not percent-encoded UTF-8")?;
    UserId::new(&text).map_err(|e| format!("chat-user: {e}"))
}

fn percent_decoded(value: &HeaderValue) -> Option<Cow<'_, str>> {
    let bytes = value.as_bytes();
    let encoded = |at: usize| {
        let digits = bytes.get(at + 1..at + 3);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let whole = (0..bytes.len()).all(|at| bytes[at] != b'%' || encoded(at));
    whole.then(|| percent_decode(bytes).decode_utf8().ok())?
}

/// Returns what the path of a request names in this place.
fn named<T: FromStr>(path: Option<&RawPathParams>, place: &str) -> Option<T> {
    let (_, value) = path?.iter().find(|(name, _)| *name == place)?;
    value.parse().ok()
}

/// Logs each request with a valid service token: the service, the user, the route and the result, but never the
/// content.
pub(super) async fn audit(request: Request, next: Next) -> Response {
    let record = Record::default();
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(record.clone());
    let method = parts.method.clone();
    let route = parts.extensions.get::<MatchedPath>().cloned();
    let path = RawPathParams::from_request_parts(&mut parts, &()).await;
    let path = path.ok();
    let conversation = named::<ConversationId>(path.as_ref(), "conversation");
    let (about, file) = (
        named::<UserId>(path.as_ref(), "user"),
        named::<AttachmentId>(path.as_ref(), "file"),
    );
    let response = next.run(Request::from_parts(parts, body)).await;
    let Some(who) = record.0.get() else {
        return response;
    };
    let method = match response.extensions().get::<Acted>() {
        Some(Acted(method)) => method,
        None => &method,
    };
    let said = response.extensions().get::<Said>();
    let conversation = conversation.or(said.and_then(|said| said.conversation));
    tracing::info!(
        target: "audit",
        service = %who.service,
        token = who.claims.token,
        key = who.claims.key,
        user = who.acting.as_ref().map(tracing::field::display),
        scope = who.scope,
        request = %format_args!("{method} {}", route.as_ref().map_or("", MatchedPath::as_str)),
        conversation = conversation.as_ref().map(tracing::field::display),
        about = about.as_ref().map(tracing::field::display),
        file = file.as_ref().map(tracing::field::display),
        result = said.and_then(|said| said.error).map_or("ok", super::requests::code_label),
        "a service acted"
    );
    response
}

#[cfg(test)]
mod tests {
    use super::SCOPES;
    use crate::protocol::Request;

    #[test]
    fn each_route_has_a_scope_that_tokens_may_have() {
        for route in Request::routes() {
            assert!(SCOPES.contains(&route.scope), "{}", route.path);
        }
    }
}
