//! The address of a client: that of its socket, or the one that a trusted proxy names. Pure functions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::http::HeaderMap;
use ipnet::IpNet;

/// Bytes of a PROXY protocol header before its addresses.
pub(super) const PROXY_HEAD_BYTES: usize = 16;
/// Bytes of a PROXY protocol header from its addresses on. Addresses take at most 36; proxies add details of TLS.
pub(super) const PROXY_REST_BYTES_MAX: usize = 2 << 10;

const PROXY_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// Returns the address that limits count: the /64 network of an IPv6 address, which is one customer, or the IPv4
/// address that is mapped to IPv6.
pub(super) fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

pub(super) fn among(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// Returns the client's address from the headers of the trusted proxy `peer`: the last address that is not a trusted
/// proxy's. The client could have written everything left of it. An unreadable address ends the search; the result is
/// then the proxy that wrote it.
pub(super) fn forwarded(headers: &HeaderMap, peer: IpAddr, trusted: &[IpNet]) -> IpAddr {
    let lines = |name| headers.get_all(name).into_iter().rev();
    let hops = |line: &str, read: fn(&str) -> Option<IpAddr>| -> Vec<Option<IpAddr>> {
        line.rsplit(',').map(|hop| read(hop.trim())).collect()
    };
    let (name, read): (_, fn(&str) -> Option<IpAddr>) = if headers.contains_key("x-forwarded-for") {
        ("x-forwarded-for", host)
    } else {
        ("forwarded", forwarded_for)
    };
    let mut client = peer;
    for hop in lines(name).flat_map(|line| hops(line.to_str().unwrap_or_default(), read)) {
        let Some(address) = hop else { break };
        client = address;
        if !among(trusted, address) {
            break;
        }
    }
    client
}

/// Reads `for` of one element of `Forwarded` (RFC 7239).
fn forwarded_for(element: &str) -> Option<IpAddr> {
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        let named = name.trim().eq_ignore_ascii_case("for");
        named
            .then(|| host(value.trim().trim_matches('"')))
            .flatten()
    })
}

/// Reads an address with an optional port.
fn host(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
    let address = bare.unwrap_or(text).parse::<IpAddr>();
    address
        .or_else(|_| text.parse::<SocketAddr>().map(|a| a.ip()))
        .ok()
}

/// Returns the number of bytes that follow the first [`PROXY_HEAD_BYTES`] of a PROXY protocol header of version 2.
/// `None` if it is not one.
pub(super) fn proxy_rest(head: &[u8; PROXY_HEAD_BYTES]) -> Option<usize> {
    let rest = usize::from(u16::from_be_bytes([head[14], head[15]]));
    let version_2 = head.starts_with(PROXY_SIGNATURE) && head[12] >> 4 == 2;
    let command_known = head[12] & 0xf <= 1;
    (version_2 && command_known && rest <= PROXY_REST_BYTES_MAX).then_some(rest)
}

/// Returns the source address in a PROXY protocol header. `Ok(None)` if the connection is the proxy's own (a health
/// check) or has no IP address.
pub(super) fn proxy_source(
    head: &[u8; PROXY_HEAD_BYTES],
    rest: &[u8],
) -> Result<Option<IpAddr>, &'static str> {
    const SHORT: &str = "the addresses are incomplete";
    let local = head[12] & 0xf == 0;
    match head[13] >> 4 {
        _ if local => Ok(None),
        1 => {
            let source = rest.get(..12).and_then(|all| all.first_chunk::<4>());
            source
                .map(|&bytes| Some(Ipv4Addr::from(bytes).into()))
                .ok_or(SHORT)
        }
        2 => {
            let source = rest.get(..36).and_then(|all| all.first_chunk::<16>());
            source
                .map(|&bytes| Some(Ipv6Addr::from(bytes).into()))
                .ok_or(SHORT)
        }
        0 | 3 => Ok(None),
        _ => Err("the address family is unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_ipv6_network_is_one_address() {
        assert_eq!(counted(ip("2001:db8:1:2:3:4:5:6")), ip("2001:db8:1:2::"));
        assert_eq!(counted(ip("2001:db8:1:3::1")), ip("2001:db8:1:3::"));
        assert_eq!(counted(ip("::ffff:192.0.2.7")), ip("192.0.2.7"));
        assert_eq!(counted(ip("192.0.2.7")), ip("192.0.2.7"));
    }

    #[test]
    fn only_what_trusted_proxies_wrote_counts() {
        let trusted = ["10.0.0.0/8", "::1/128"].map(|n| n.parse().unwrap());
        let peer = ip("10.0.0.1");
        let seen = |name: &'static str, lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(name, line.parse().unwrap());
            }
            forwarded(&headers, peer, &trusted)
        };
        for (lines, client) in [
            (&[][..], "10.0.0.1"),
            (&["203.0.113.9"], "203.0.113.9"),
            (&["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
            (&["203.0.113.9, 10.1.2.3"], "203.0.113.9"),
            (&["203.0.113.9", "10.1.2.3, 10.1.2.4"], "203.0.113.9"),
            (&["203.0.113.9:4711"], "203.0.113.9"),
            (&["2001:db8::7"], "2001:db8::7"),
            (&["[2001:db8::7]:4711, ::1"], "2001:db8::7"),
            (&["203.0.113.9, unknown, 10.1.2.3"], "10.1.2.3"),
            (&["10.9.9.9"], "10.9.9.9"),
            (&["nonsense"], "10.0.0.1"),
        ] {
            assert_eq!(seen("x-forwarded-for", lines), ip(client), "{lines:?}");
        }
        for (lines, client) in [
            (&["for=203.0.113.9"][..], "203.0.113.9"),
            (
                &["for=198.51.100.1;proto=http, By=x; For=203.0.113.9"],
                "203.0.113.9",
            ),
            (&["for=\"[2001:db8::7]:4711\";by=10.0.0.1"], "2001:db8::7"),
            (&["for=\"198.51.100.1, for=203.0.113.9"], "203.0.113.9"),
            (&["for=_hidden"], "10.0.0.1"),
        ] {
            assert_eq!(seen("forwarded", lines), ip(client), "{lines:?}");
        }
    }

    #[test]
    fn a_proxy_header_says_the_source() {
        let head = |command: u8, family: u8, rest: u16| {
            let mut head = [0; PROXY_HEAD_BYTES];
            head[..12].copy_from_slice(PROXY_SIGNATURE);
            head[12] = 0x20 | command;
            head[13] = family << 4 | 1;
            head[14..].copy_from_slice(&rest.to_be_bytes());
            head
        };
        let v4 = [203, 0, 113, 9, 127, 0, 0, 1, 1, 2, 3, 4];
        assert_eq!(proxy_rest(&head(1, 1, 12)), Some(12));
        assert_eq!(
            proxy_source(&head(1, 1, 12), &v4),
            Ok(Some(ip("203.0.113.9")))
        );
        assert!(proxy_source(&head(1, 1, 11), &v4[..11]).is_err());
        assert!(proxy_source(&head(1, 2, 12), &v4).is_err());
        let mut v6 = [0; 36];
        v6[..4].copy_from_slice(&[0x20, 1, 0xd, 0xb8]);
        assert_eq!(
            proxy_source(&head(1, 2, 36), &v6),
            Ok(Some(ip("2001:db8::")))
        );
        assert_eq!(proxy_source(&head(0, 1, 12), &v4), Ok(None));
        assert_eq!(proxy_source(&head(1, 0, 0), &[]), Ok(None));
        assert!(proxy_source(&head(1, 4, 12), &v4).is_err());
        assert_eq!(proxy_rest(&head(1, 1, 60_000)), None);
        assert_eq!(proxy_rest(&head(2, 1, 12)), None);
        assert_eq!(proxy_rest(b"GET / HTTP/1.1\r\n"), None);
    }
}
