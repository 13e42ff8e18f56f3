//! Upgrades an HTTP request to a session: checks the origin, limits and the subprotocol.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    extract::{Extension, State, WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection},
    http::{HeaderMap, header},
    response::Response,
};
use metrics::counter;

use super::{
    Gateway,
    address::forwarded,
    admission::{Admission, Full, Place, SharedPlace},
    host,
    listener::Peer,
    reply::{refused_with, respond},
    session::Session,
};
use crate::{
    fanout::FrameWriter,
    model::SessionId,
    protocol::{Answer, Codec, ErrorCode, Refusal},
    tasks::contain,
};

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
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    if gateway.tasks.is_draining() {
        return refuse(ErrorCode::Unavailable, "draining", "draining".into());
    }
    if let Err(origin) = allowed(&gateway.origins, &headers) {
        crate::seldom::seldom!(WARN, "a page's origin is not in client.origins", %origin);
        let text = format!("origin {origin} is not allowed: see client.origins");
        return refuse(ErrorCode::Forbidden, "origin", text);
    }
    let upgrade = match upgrade {
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
