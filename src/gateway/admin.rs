//! The internal port, for operators and monitoring. It answers before the gateway has started.

use std::sync::{Arc, OnceLock};

use axum::{Json, Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;

use super::Gateway;
use crate::store::Error;

pub struct Admin {
    metrics: PrometheusHandle,
    /// The gateway, set when it can serve clients.
    gateway: OnceLock<Arc<Gateway>>,
}

impl Admin {
    #[must_use]
    pub fn new(metrics: PrometheusHandle) -> Self {
        let gateway = OnceLock::new();
        Self { metrics, gateway }
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
            .with_state(self.clone())
    }
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
