//! The chat page at `/`: what `npm run page` in `client-js` built, inside the program. Nothing of it comes from elsewhere.

use axum::{
    Router,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use xxhash_rust::xxh3::xxh3_64;

/// Only what the gateway itself serves is loaded or run, and nothing of it is inline; no markup is made from text.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const FILES: [(&str, &str, &[u8]); 5] = [
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

pub(super) fn routes() -> Router {
    FILES
        .into_iter()
        .fold(Router::new(), |routes, (path, kind, bytes)| {
            let tag = format!("\"{:016x}\"", xxh3_64(bytes));
            routes.route(
                path,
                get(async move |headers: HeaderMap| file(&headers, kind, &tag, bytes)),
            )
        })
}

/// Asked for each time, and sent when it is another one than the browser has: another version of the gateway.
fn file(asked: &HeaderMap, kind: &'static str, tag: &str, bytes: &'static [u8]) -> Response {
    let known = asked.get(header::IF_NONE_MATCH);
    let same = known
        .and_then(|known| known.to_str().ok())
        .is_some_and(|known| known.split(',').any(|one| one.trim() == tag));
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::ETAG, tag),
    ];
    if same {
        (StatusCode::NOT_MODIFIED, headers).into_response()
    } else {
        (headers, bytes).into_response()
    }
}
