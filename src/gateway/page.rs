//! The chat page at `/`, which `npm run page` in `client-js` builds. The program contains all its files.

use std::sync::Arc;

use axum::{
    Router,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use xxhash_rust::xxh3::xxh3_64;

use super::conditions;

/// Returns the content security policy: only files of the gateway are loaded and run, nothing inline, and no text becomes
/// markup. Uploaded files may be in a bucket, and nothing else of its storage is allowed.
fn policy(bucket: Option<&str>) -> Option<HeaderValue> {
    let files = bucket
        .map(|origin| format!(" {origin}"))
        .unwrap_or_default();
    let text = format!(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'{files}; media-src 'self'{files}; \
         connect-src 'self'{files}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types worker"
    );
    HeaderValue::from_str(&text).ok()
}

const FILES: [(&str, &str, &[u8]); 6] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_bytes!("../../client-js/page/dist/index.html"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../client-js/page/dist/page.js"),
    ),
    (
        "/msgpack.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../client-js/page/dist/msgpack.js"),
    ),
    (
        "/worker.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../client-js/page/dist/worker.js"),
    ),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_bytes!("../../client-js/page/dist/page.css"),
    ),
    (
        "/icon.svg",
        "image/svg+xml",
        include_bytes!("../../client-js/page/dist/icon.svg"),
    ),
];

/// Returns the routes of the page. `bucket` is how the addresses of the bucket of uploaded files begin, if they are in one.
pub(super) fn routes(bucket: Option<&str>) -> Router {
    let policy = Arc::new(policy(bucket));
    FILES
        .into_iter()
        .fold(Router::new(), |routes, (path, kind, bytes)| {
            let tag = format!("\"{:016x}\"", xxh3_64(bytes));
            let policy = policy.clone();
            let served = async move |headers: HeaderMap| {
                let mut response = file(&headers, kind, &tag, bytes);
                if let Some(policy) = &*policy {
                    let name = header::CONTENT_SECURITY_POLICY;
                    response.headers_mut().insert(name, policy.clone());
                }
                response
            };
            routes.route(path, get(served))
        })
}

/// Serves a file with an ETag. The browser revalidates it on every load, so a new version of the gateway is seen at
/// once.
fn file(asked: &HeaderMap, kind: &'static str, tag: &str, bytes: &'static [u8]) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::ETAG, tag),
    ];
    match conditions::unmet(asked, tag) {
        None => (headers, bytes).into_response(),
        Some(StatusCode::NOT_MODIFIED) => (StatusCode::NOT_MODIFIED, headers).into_response(),
        Some(_) => conditions::failed(),
    }
}
