//! The routes of devices: for users with tokens of their own, and for back ends.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    middleware,
    response::Response,
    routing::{get, put},
};

use super::{At, ask};
use crate::{
    gateway::{
        Gateway, files,
        reply::{Body, Path},
        service::{DevicesRead, DevicesWrite, Person},
    },
    protocol::{DeviceSet, NamedDevice, Refusal, Registration, Request},
};

/// Returns the routes. Pages of other origins may use them as they may use the WebSocket.
pub(super) fn routes(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    let share = middleware::from_fn_with_state(gateway.clone(), files::share);
    Router::new()
        .route("/v1/devices", get(list).options(options))
        .route(
            "/v1/devices/{device}",
            put(set).delete(remove).options(options),
        )
        .layer(share)
}

async fn options() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// Lists the devices of the user, without their secrets, and the key with which a browser subscribes.
#[utoipa::path(get, path = "/v1/devices", security(("user" = []), ("service" = ["devices:read"])),
    responses((status = 200, body = crate::protocol::DeviceList), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn list(State(gateway): At, person: Person<DevicesRead>) -> Response {
    ask(&gateway, person.acting, Request::Devices).await
}

/// Registers a device to which messages are pushed, or replaces it.
#[utoipa::path(put, path = "/v1/devices/{device}", request_body = Registration,
    params(("device" = String, Path)), security(("user" = []), ("service" = ["devices:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn set(
    State(gateway): At,
    person: Person<DevicesWrite>,
    Path(device): Path<String>,
    Body(registration): Body<Registration>,
) -> Response {
    let set = DeviceSet {
        device,
        registration,
    };
    ask(&gateway, person.acting, Request::DeviceSet(set)).await
}

/// Removes a device.
#[utoipa::path(delete, path = "/v1/devices/{device}", params(("device" = String, Path)),
    security(("user" = []), ("service" = ["devices:write"])),
    responses((status = 200, body = crate::protocol::Okay), (status = "default", body = Refusal)))]
pub(in crate::gateway) async fn remove(
    State(gateway): At,
    person: Person<DevicesWrite>,
    Path(device): Path<String>,
) -> Response {
    let named = NamedDevice { device };
    ask(&gateway, person.acting, Request::DeviceRemove(named)).await
}
