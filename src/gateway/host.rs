//! The host that a request names, and whether it is that of a page's origin. Pure functions.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::{HeaderMap, HeaderValue, Request, Version, header, uri::Authority};

/// Checks the host of a request (RFC 9112, section 3.2), and makes `Host` the one host of the request: that of an absolute
/// target comes before the header.
///
/// # Errors
/// The reason why the request is malformed.
pub(super) fn settle<B>(request: &mut Request<B>) -> Result<(), &'static str> {
    let mut named = request.headers().get_all(header::HOST).into_iter();
    let first = named.next();
    if first.is_none() && request.version() >= Version::HTTP_11 {
        return Err("the header Host is missing");
    }
    if named.next().is_some() {
        return Err("there is more than one header Host");
    }
    if let Some(host) = first
        && !host.is_empty()
        && authority(host).is_none()
    {
        return Err("the header Host has no valid host");
    }
    if let Some(target) = request.uri().authority() {
        let host = HeaderValue::from_str(target.as_str());
        let host = host.map_err(|_| "the target has no valid host")?;
        request.headers_mut().insert(header::HOST, host);
    }
    Ok(())
}

/// Reads a host with an optional port.
fn authority(value: &HeaderValue) -> Option<Authority> {
    let authority: Authority = value.to_str().ok()?.parse().ok()?;
    (!authority.as_str().contains('@')).then_some(authority)
}

/// Returns whether a request names its host by an address, as `localhost`, as one of `known`, or not at all. A page can
/// make its own name resolve to this machine, but its requests still name it (DNS rebinding).
pub(super) fn is_known(headers: &HeaderMap, known: &[String]) -> bool {
    let Some(host) = headers.get(header::HOST).filter(|host| !host.is_empty()) else {
        return true;
    };
    authority(host).is_some_and(|authority| {
        let name = authority.host();
        let v6 = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
        let is_address = v6.map_or_else(
            || name.parse::<Ipv4Addr>().is_ok(),
            |v6| v6.parse::<Ipv6Addr>().is_ok(),
        );
        let mut known = known.iter().map(String::as_str).chain(["localhost"]);
        is_address || known.any(|known| known.eq_ignore_ascii_case(name))
    })
}

/// Returns whether a page of `origin` was loaded from the host of the request. `Host` does not say the scheme, so that of
/// the origin decides which port may be missing.
pub(super) fn is_own(origin: &str, headers: &HeaderMap) -> bool {
    let own = headers.get(header::HOST).and_then(authority);
    let Some(((scheme, origin), own)) = split(origin).zip(own) else {
        return false;
    };
    let port = |of: &Authority| of.port_u16().or_else(|| default_port(&scheme));
    origin.host().eq_ignore_ascii_case(own.host()) && port(&origin) == port(&own)
}

/// Returns whether two texts are the same origin (RFC 6454).
pub(super) fn is_same(origin: &str, other: &str) -> bool {
    let (Some((scheme, one)), Some((other_scheme, other))) = (split(origin), split(other)) else {
        return origin == other;
    };
    let port = |of: &Authority| of.port_u16().or_else(|| default_port(&scheme));
    scheme == other_scheme
        && one.host().eq_ignore_ascii_case(other.host())
        && port(&one) == port(&other)
}

/// Splits an origin into its scheme, in lower case, and its host with an optional port.
fn split(origin: &str) -> Option<(String, Authority)> {
    let (scheme, rest) = origin.split_once("://")?;
    let authority: Authority = rest.parse().ok()?;
    (!rest.contains('@')).then(|| (scheme.to_ascii_lowercase(), authority))
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(host: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HOST, host.parse().unwrap())])
    }

    #[test]
    fn the_own_page_is_known_whatever_form_its_host_has() {
        for (origin, host, own) in [
            ("http://chat.example:8080", "chat.example:8080", true),
            ("http://chat.example", "chat.example:80", true),
            ("https://chat.example", "chat.example:443", true),
            ("https://chat.example", "chat.example", true),
            ("https://chat.example", "Chat.EXAMPLE", true),
            ("https://chat.example:443", "chat.example", true),
            ("http://[::1]:8080", "[::1]:8080", true),
            ("https://chat.example", "chat.example:80", false),
            ("http://chat.example", "chat.example:443", false),
            ("http://chat.example", "chat.example:8080", false),
            ("https://evil.example", "chat.example", false),
            ("https://chat.example.evil.example", "chat.example", false),
            ("https://chat.example@evil.example", "evil.example", false),
            ("null", "chat.example", false),
            ("chat.example", "chat.example", false),
            ("https://chat.example/", "chat.example", false),
        ] {
            assert_eq!(is_own(origin, &named(host)), own, "{origin} {host}");
        }
        assert!(!is_own("http://chat.example", &HeaderMap::new()));
    }

    #[test]
    fn origins_are_compared_by_scheme_host_and_port() {
        assert!(is_same("https://App.example", "https://app.example:443"));
        assert!(is_same("app://shell", "app://shell"));
        assert!(is_same("null", "null"));
        assert!(!is_same("https://app.example", "http://app.example"));
        assert!(!is_same("https://app.example", "https://app.example:444"));
        assert!(!is_same("null", "https://app.example"));
    }

    #[test]
    fn a_name_must_be_known_and_an_address_need_not_be() {
        let known = ["gateway-1".to_owned()];
        for (host, is) in [
            ("127.0.0.1:9090", true),
            ("10.0.0.7", true),
            ("[::1]:9090", true),
            ("LOCALHOST:9090", true),
            ("Gateway-1:9090", true),
            ("", true),
            ("gateway-2:9090", false),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("localhost@evil.example", false),
        ] {
            assert_eq!(is_known(&named(host), &known), is, "{host}");
        }
        assert!(is_known(&HeaderMap::new(), &known));
    }
}
