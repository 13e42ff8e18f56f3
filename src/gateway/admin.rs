//! The internal port, for operators and monitoring. It answers before the gateway has started.

use std::sync::{Arc, OnceLock};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;

use super::{Gateway, host, reply::refused_with};
use crate::{protocol::ErrorCode, store::Error};

pub struct Admin {
    metrics: PrometheusHandle,
    /// The gateway, set when it can serve clients.
    gateway: OnceLock<Arc<Gateway>>,
    /// The names under which operators reach the port.
    hosts: Vec<String>,
}

impl Admin {
    #[must_use]
    pub fn new(metrics: PrometheusHandle, hosts: Vec<String>) -> Self {
        Self {
            metrics,
            gateway: OnceLock::new(),
            hosts,
        }
    }

    /// Lets the readiness check ask the gateway.
    pub fn ready(&self, gateway: Arc<Gateway>) {
        drop(self.gateway.set(gateway));
    }

    /// Returns the routes for health and metrics.
    pub fn routes(self: &Arc<Self>) -> Router {
        Router::new()
            .route(
                "/health/live",
                get(async || Json(json!({"status": "alive"}))),
            )
            .route("/health/ready", get(ready))
            .route(
                "/metrics",
                get(async |State(admin): State<Arc<Self>>| admin.metrics.render()),
            )
            .layer(middleware::from_fn_with_state(self.clone(), known))
            .with_state(self.clone())
    }
}

/// Refuses requests to names that are not configured. Otherwise any page could read the metrics, by a name of its own that
/// resolves to this machine.
async fn known(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    if host::is_known(request.headers(), &admin.hosts) {
        return next.run(request).await;
    }
    let status = StatusCode::MISDIRECTED_REQUEST;
    let text = "this port answers to addresses, localhost and the names in internal.hosts";
    refused_with(status, ErrorCode::Forbidden, text.to_owned())
}

/// Answers whether new clients should be sent here.
async fn ready(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let unavailable = |body| (StatusCode::SERVICE_UNAVAILABLE, Json(body));
    let Some(gateway) = admin.gateway.get() else {
        return unavailable(json!({"status": "starting", "reason": "the store is not ready"}));
    };
    if gateway.tasks.is_draining() {
        return unavailable(json!({"status": "draining"}));
    }
    match gateway.router.ready() {
        Err(error) => {
            let status = match &error {
                Error::Corrupt { .. } => "store damaged",
                _ => "store unavailable",
            };
            unavailable(json!({"status": status, "reason": error.to_string()}))
        }
        Ok(()) => (StatusCode::OK, Json(json!({"status": "ready"}))),
    }
}
