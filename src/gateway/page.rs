//! The chat page at `/`, which `npm run page` in `client-js` builds. The program contains all its files.

use std::{
    io::Write as _,
    sync::{Arc, OnceLock},
};

use axum::{
    Router,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
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

const FILES: [(&str, &str, &[u8]); 8] = [
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
        "/emoji.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../client-js/page/dist/emoji.js"),
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
    (
        "/licenses.md",
        "text/markdown; charset=utf-8",
        include_bytes!("../../client-js/page/dist/licenses.md"),
    ),
];

/// Returns the routes of the page. `bucket` is how the addresses of the bucket of uploaded files begin, if they are in one.
pub(super) fn routes(bucket: Option<&str>) -> Router {
    let policy = Arc::new(policy(bucket));
    FILES
        .into_iter()
        .fold(Router::new(), |routes, (path, kind, bytes)| {
            let file = Arc::new(File::new(kind, bytes));
            let policy = policy.clone();
            let served = async move |headers: HeaderMap| {
                let mut response = file.serve(&headers);
                if let Some(policy) = &*policy {
                    let name = header::CONTENT_SECURITY_POLICY;
                    response.headers_mut().insert(name, policy.clone());
                }
                response
            };
            routes.route(path, get(served))
        })
}

struct File {
    kind: &'static str,
    bytes: &'static [u8],
    /// The bytes in gzip format, once somebody has asked for them.
    compressed: OnceLock<Option<Bytes>>,
    tag: String,
}

impl File {
    fn new(kind: &'static str, bytes: &'static [u8]) -> Self {
        Self {
            kind,
            bytes,
            compressed: OnceLock::new(),
            tag: format!("\"{:016x}\"", xxh3_64(bytes)),
        }
    }

    /// Serves the file with an ETag. The browser revalidates it on every load, so a new version of the gateway is seen at
    /// once. The tag of the compressed file is a weak one, because its bytes are others.
    fn serve(&self, asked: &HeaderMap) -> Response {
        let compressed = accepts_gzip(asked).then(|| self.compressed()).flatten();
        let weak = compressed.as_ref().map_or("", |_| "W/");
        let headers = [
            (header::CONTENT_TYPE, self.kind),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
            (header::VARY, "accept-encoding"),
            (header::ETAG, &format!("{weak}{}", self.tag)),
        ];
        match (conditions::unmet(asked, &self.tag), compressed) {
            (None, Some(bytes)) => {
                (headers, [(header::CONTENT_ENCODING, "gzip")], bytes).into_response()
            }
            (None, None) => (headers, self.bytes).into_response(),
            (Some(code @ StatusCode::NOT_MODIFIED), _) => (code, headers).into_response(),
            (Some(_), _) => conditions::failed(),
        }
    }

    fn compressed(&self) -> Option<Bytes> {
        let compress = || {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(self.bytes).ok()?;
            encoder.finish().ok().map(Bytes::from)
        };
        self.compressed.get_or_init(compress).clone()
    }
}

/// Whether the client takes gzip format (RFC 9110, section 12.5.3): if it names it, or `*`, with a weight above 0.
fn accepts_gzip(asked: &HeaderMap) -> bool {
    let lines = asked.get_all(header::ACCEPT_ENCODING).into_iter();
    let mut codings = lines
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','));
    codings.any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, "q=1"));
        let weight = weight.trim().strip_prefix("q=");
        let is_wanted = weight.and_then(|q| q.parse().ok()).unwrap_or(0.0_f32) > 0.0;
        is_wanted
            && ["gzip", "*"]
                .iter()
                .any(|known| name.trim().eq_ignore_ascii_case(known))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_only_to_clients_that_take_it() {
        for (value, accepts) in [
            ("gzip, deflate, br", true),
            ("br;q=1.0, GZIP;q=0.8", true),
            ("*", true),
            ("gzip;q=0, br", false),
            ("gzip ; q=0.000", false),
            ("identity", false),
            ("", false),
        ] {
            let asked = HeaderMap::from_iter([(header::ACCEPT_ENCODING, value.parse().unwrap())]);
            assert_eq!(accepts_gzip(&asked), accepts, "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
