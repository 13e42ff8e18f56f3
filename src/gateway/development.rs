//! Development tokens, for any user. Only programs and pages of this machine get them, and only directly, not through a
//! proxy.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use axum::{
    Extension, Json,
    extract::{FromRequest as _, Request, State},
    http::{HeaderMap, Uri, header, uri::Authority},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    Gateway,
    listener::Peer,
    reply::{Body, refused},
};
use crate::{
    clock,
    model::UserId,
    protocol::{ErrorCode, Refusal},
};

/// The validity of a development token in seconds.
const TOKEN_S: u64 = 3600;

#[derive(Deserialize, ToSchema)]
pub(super) struct TokenRequest {
    #[schema(value_type = String)]
    pub(super) user: UserId,
}

#[derive(Serialize, ToSchema)]
pub(super) struct TokenAnswer {
    token: String,
    /// Milliseconds since 1970.
    expires_at: i64,
}

/// Returns a token for any user. Only in development, and only to this machine.
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenRequest,
    responses((status = 200, body = TokenAnswer), (status = 404, body = Refusal)))]
pub(super) async fn token(
    State(gateway): State<Arc<Gateway>>,
    Extension(peer): Extension<Peer>,
    uri: Uri,
    headers: HeaderMap,
    request: Request,
) -> Response {
    let here =
        peer.socket.to_canonical().is_loopback() && peer.address.to_canonical().is_loopback();
    if !gateway.tokens.development() || !here || !asked_directly(&uri, &headers) {
        return refused(ErrorCode::NotFound, "tokens come from your own back end");
    }
    let request = match Body::<TokenRequest>::from_request(request, &gateway).await {
        Ok(Body(request)) => request,
        Err(refused) => return refused,
    };
    match gateway.tokens.sign(&request.user, None, TOKEN_S) {
        Ok(token) => {
            let seconds = i64::try_from(TOKEN_S).unwrap_or_default();
            let expires_at = clock::wall() + seconds * 1000;
            Json(TokenAnswer { token, expires_at }).into_response()
        }
        Err(error) => refused(ErrorCode::Internal, error.to_string()),
    }
}

/// Returns whether a program of this machine, or a page of this gateway, made the request directly. It is false for a
/// proxy's request, for a page of another origin, and for a host name that was made to resolve to this machine.
fn asked_directly(uri: &Uri, headers: &HeaderMap) -> bool {
    let forwarded = |name: &str| {
        ["forwarded", "via", "x-real-ip"].contains(&name) || name.starts_with("x-forwarded-")
    };
    // Browsers send this header, so pages of other origins cannot fetch tokens.
    let same_origin = headers
        .get("sec-fetch-site")
        .is_none_or(|site| site == "same-origin");
    let mut hosts = headers.get_all(header::HOST).into_iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    let host_is_here = host
        .and_then(|host| host.parse().ok())
        .is_some_and(|host| is_here(&host));
    host_is_here
        && hosts.next().is_none()
        && uri.authority().is_none_or(is_here)
        && same_origin
        && !headers.keys().any(|name| forwarded(name.as_str()))
}

/// Returns whether this is a name or address of this machine, with any port.
fn is_here(host: &Authority) -> bool {
    let name = host.host();
    let v6 = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
    let address = match v6 {
        Some(v6) => v6.parse::<Ipv6Addr>().ok().map(IpAddr::from),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::from),
    };
    name.eq_ignore_ascii_case("localhost") || address.is_some_and(|address| address.is_loopback())
}
