//! The internal port: for operators and their monitoring, never for strangers.

use std::sync::Arc;

use axum::{Json, Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use serde_json::json;

use super::Gateway;

pub(super) fn routes(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route(
            "/health/live",
            get(async || Json(json!({"status": "alive"}))),
        )
        .route("/health/ready", get(ready))
        .route(
            "/metrics",
            get(async |State(gateway): State<Arc<Gateway>>| gateway.metrics.render()),
        )
        .with_state(gateway)
}

/// Whether new clients should be sent here.
async fn ready(State(gateway): State<Arc<Gateway>>) -> impl IntoResponse {
    let (status, body) = if gateway.tasks.is_draining() {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "draining"}),
        )
    } else if let Err(error) = gateway.router.ready() {
        let body = json!({"status": "store unavailable", "reason": error.to_string()});
        (StatusCode::SERVICE_UNAVAILABLE, body)
    } else {
        (StatusCode::OK, json!({"status": "ready"}))
    };
    (status, Json(body))
}
