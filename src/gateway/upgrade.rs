//! Upgrades an HTTP request to a session: checks the origin, limits and the subprotocol.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    extract::{Extension, FromRequestParts as _, Request, State, WebSocketUpgrade},
    http::{HeaderMap, HeaderValue, StatusCode, Version, header, request::Parts},
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use metrics::counter;

use super::{
    Gateway,
    address::forwarded,
    admission::{Admission, Full, Place, SharedPlace},
    host,
    listener::Peer,
    reply::{refused, refused_with, respond},
    session::Session,
};
use crate::{
    fanout::FrameWriter,
    model::SessionId,
    protocol::{Answer, Codec, ErrorCode, Refusal},
    tasks::contain,
};

/// The only version of WebSocket (RFC 6455).
const VERSION: &str = "13";
/// The buffer of each connection, allocated at its start. Most requests of a chat fit into it; larger ones take more
/// reads.
const READ_BUFFER_BYTES: usize = 512;
/// Bytes of pongs that may wait for a client that pings and reads nothing. All other frames bypass the library.
const CONTROL_BYTES_MAX: usize = 4 << 10;

/// Answers the request for a WebSocket: refuses it, or starts a session on the connection.
pub(super) async fn upgrade(
    State(gateway): State<Arc<Gateway>>,
    Extension(peer): Extension<Peer>,
    Extension(place): Extension<SharedPlace>,
    Extension(writer): Extension<Arc<FrameWriter>>,
    request: Request,
) -> Response {
    let (mut parts, _) = request.into_parts();
    if gateway.tasks.is_draining() {
        return refuse(ErrorCode::Unavailable, "draining", "draining".into());
    }
    if let Err(origin) = allowed(&gateway.origins, &parts.headers) {
        crate::seldom::seldom!(WARN, "a page's origin is not in client.origins", %origin);
        let text = format!("origin {origin} is not allowed: see client.origins");
        return refuse(ErrorCode::Forbidden, "origin", text);
    }
    if let Err(refused) = settle(&mut parts) {
        return refused;
    }
    let headers = parts.headers.clone();
    let upgrade = match WebSocketUpgrade::from_request_parts(&mut parts, &()).await {
        Ok(upgrade) => upgrade.protocols(Codec::SUBPROTOCOLS.map(|(name, _)| name)),
        Err(rejection) => {
            let (status, text) = (rejection.status(), rejection.body_text());
            return refused_with(status, ErrorCode::BadRequest, text);
        }
    };
    let Some(codec) = chosen_codec(&upgrade, &headers) else {
        let text = "no subprotocol in common: chat.v1.json or chat.v1.msgpack".into();
        return refuse(ErrorCode::BadRequest, "subprotocol", text);
    };
    match take_place(&gateway.admission, peer, &place, &headers) {
        Ok(place) => start(gateway, upgrade, codec, writer, place),
        Err(full) => {
            full.count();
            respond(Answer::Error(full.refusal()))
        }
    }
}

/// Checks the opening handshake (RFC 6455, section 4.2.1) where the library does not, and gives its lists the form that
/// the library understands: proxies and clients may write a list in several lines.
#[expect(clippy::result_large_err, reason = "a response either way")]
fn settle(parts: &mut Parts) -> Result<(), Response> {
    let wrong = |text: &str| refused(ErrorCode::BadRequest, text);
    let headers = &mut parts.headers;
    for (name, token) in [
        (header::CONNECTION, "upgrade"),
        (header::UPGRADE, "websocket"),
    ] {
        let lines = headers.get_all(&name).into_iter();
        let mut tokens = lines.flat_map(|l| l.to_str().unwrap_or_default().split(','));
        if parts.version < Version::HTTP_11 || !tokens.any(|t| t.trim().eq_ignore_ascii_case(token))
        {
            let text =
                "this is the address of a WebSocket: Connection and Upgrade do not ask for one";
            return Err(wrong(text));
        }
        headers.insert(name, HeaderValue::from_static(token));
    }
    let mut versions = headers.get_all(header::SEC_WEBSOCKET_VERSION).into_iter();
    if versions.next().is_none_or(|version| version != VERSION) || versions.next().is_some() {
        return Err(another_version());
    }
    let mut keys = headers.get_all(header::SEC_WEBSOCKET_KEY).into_iter();
    let key = keys
        .next()
        .ok_or_else(|| wrong("the header Sec-WebSocket-Key is missing"))?;
    let nonce = BASE64_STANDARD.decode(key.as_bytes());
    if !nonce.is_ok_and(|nonce| nonce.len() == 16) || keys.next().is_some() {
        return Err(wrong(
            "the header Sec-WebSocket-Key is not 16 bytes in Base64",
        ));
    }
    Ok(())
}

/// Refuses another version of WebSocket, and names the one that is supported.
fn another_version() -> Response {
    let headers = [
        (header::UPGRADE, "websocket"),
        (header::CONNECTION, "upgrade"),
        (header::SEC_WEBSOCKET_VERSION, VERSION),
    ];
    let text = "only version 13 of WebSocket is supported".to_owned();
    let refused = refused_with(StatusCode::UPGRADE_REQUIRED, ErrorCode::BadRequest, text);
    (headers, refused).into_response()
}

fn refuse(code: ErrorCode, reason: &'static str, message: String) -> Response {
    counter!("chat_connects_refused_total", "reason" => reason).increment(1);
    let again = matches!(code, ErrorCode::Unavailable | ErrorCode::RateLimited);
    respond(Answer::Error(Refusal {
        code,
        message,
        retry_after_ms: again.then_some(1000),
    }))
}

/// Returns the codec of the subprotocol in common, or JSON if the client names no subprotocols. `None` if it names only
/// others.
fn chosen_codec(upgrade: &WebSocketUpgrade, headers: &HeaderMap) -> Option<Codec> {
    let chosen = upgrade.selected_protocol().and_then(|p| p.to_str().ok());
    let codec = Codec::SUBPROTOCOLS
        .iter()
        .find(|(name, _)| Some(*name) == chosen);
    match codec {
        Some((_, codec)) => Some(*codec),
        None if headers.contains_key(header::SEC_WEBSOCKET_PROTOCOL) => None,
        None => Some(Codec::Json),
    }
}

/// Takes the place of the connection for its session. Behind a trusted proxy it counts for the client's address.
fn take_place(
    admission: &Admission,
    peer: Peer,
    place: &SharedPlace,
    headers: &HeaderMap,
) -> Result<Place, Full> {
    if admission.is_trusted_proxy(peer.address) {
        let client = forwarded(headers, peer.address, admission.trusted_proxies());
        place.take_for(client)
    } else {
        place.take()
    }
}

/// Switches the connection to a WebSocket and runs its session.
fn start(
    gateway: Arc<Gateway>,
    upgrade: WebSocketUpgrade,
    codec: Codec,
    writer: Arc<FrameWriter>,
    place: Place,
) -> Response {
    let id = SessionId(gateway.next_session.fetch_add(1, Ordering::Relaxed));
    let frame_bytes = gateway.limits.frame_bytes;
    let tasks = gateway.tasks.clone();
    upgrade
        .read_buffer_size(READ_BUFFER_BYTES)
        .write_buffer_size(0)
        .max_write_buffer_size(CONTROL_BYTES_MAX)
        .max_message_size(frame_bytes)
        .max_frame_size(frame_bytes)
        .on_upgrade(move |socket| {
            // A future that owned the session would contain it twice, as its argument and as its variable.
            let mut session = Box::new(Session::new(id, gateway, socket, codec, writer, place));
            tasks.track(async move {
                // A panic drops the session, which releases everything it holds. Its client reconnects.
                contain("a session", id, session.run()).await;
            })
        })
}

/// Checks the origin. Browsers send the origin of the page that connects; other clients need not send one. Pages of
/// this gateway are always allowed.
pub(super) fn allowed(origins: &[String], headers: &HeaderMap) -> Result<(), String> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let Ok(origin) = origin.to_str() else {
        return Err("(not text)".into());
    };
    let allowed = |allowed: &String| allowed == "*" || host::is_same(allowed, origin);
    if host::is_own(origin, headers) || origins.iter().any(allowed) {
        Ok(())
    } else {
        Err(origin.chars().take(200).collect())
    }
}
