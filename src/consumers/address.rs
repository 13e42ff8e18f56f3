//! Which addresses the gateway may send requests to. A name or an address may be chosen by someone else, who must not reach
//! the internal network through the gateway. This file is pure: names are resolved in `http.rs`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use reqwest::Url;

/// The addresses that a request may be sent to. They depend on who chose the destination.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// Set by the operator: public addresses over https.
    Operator {
        /// Networks that are allowed besides public addresses.
        allow: Vec<IpNet>,
        /// Whether http is allowed.
        http: bool,
        /// Whether this machine is allowed, also over http.
        development: bool,
    },
    /// Given by users: public addresses over https, always.
    Public,
}

/// Why an address is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{address} is {what}")]
pub struct RefusedAddress {
    pub address: IpAddr,
    what: &'static str,
}

impl Class {
    /// Checks whether a request may be sent to this address.
    ///
    /// # Errors
    /// The address is not public, and this class does not allow it.
    pub fn check(&self, address: IpAddr) -> Result<(), RefusedAddress> {
        let allowed = match self {
            Self::Operator {
                allow, development, ..
            } => {
                *development && address.is_loopback()
                    || allow.iter().any(|network| network.contains(&address))
            }
            Self::Public => false,
        };
        match special(address) {
            Some(what) if !allowed => Err(RefusedAddress { address, what }),
            _ => Ok(()),
        }
    }

    /// Checks the scheme of a URL, and an address in it, which is not resolved.
    ///
    /// # Errors
    /// The reason why no request may be sent there.
    pub fn check_url(&self, url: &Url) -> Result<(), String> {
        let Some(host) = url.host_str() else {
            return Err("the URL has no host".into());
        };
        // The URL's parser has turned all other ways to write an address into this one: 0x7f.1 is 127.0.0.1.
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let literal = literal.parse::<IpAddr>().ok();
        if let Some(Err(error)) = literal.map(|address| self.check(address)) {
            return Err(error.to_string());
        }
        // This name always means this machine, and its addresses are checked too.
        let here = (host == "localhost").then_some(IpAddr::from([127, 0, 0, 1]));
        match url.scheme() {
            "https" => Ok(()),
            "http" if self.allows_http(literal.or(here)) => Ok(()),
            scheme => Err(format!("{scheme} is not allowed, only https")),
        }
    }

    /// Returns whether a host may be reached without encryption. Its address is `None` if it is a name.
    fn allows_http(&self, address: Option<IpAddr>) -> bool {
        match self {
            Self::Operator {
                http, development, ..
            } => *http || *development && address.is_some_and(|address| address.is_loopback()),
            Self::Public => false,
        }
    }
}

/// Returns what an address is that is not public. `None` if it is public.
fn special(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => special_v4(address),
        IpAddr::V6(address) => special_v6(address),
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(a: u16, b: u16, c: u16, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0), prefix)
}

/// The networks of the special-purpose registry of IANA, and what clouds have in public ones.
const SPECIAL_V4: &[(Ipv4Net, &str)] = &[
    (v4(0, 0, 0, 0, 8), "unspecified"),
    (v4(10, 0, 0, 0, 8), "private"),
    (v4(100, 64, 0, 0, 10), "shared by customers of a provider"),
    (v4(127, 0, 0, 0, 8), "of this machine"),
    // Also the metadata of most clouds: 169.254.169.254.
    (v4(169, 254, 0, 0, 16), "link-local"),
    (v4(172, 16, 0, 0, 12), "private"),
    (v4(192, 0, 0, 0, 24), "reserved for protocols"),
    (v4(192, 0, 2, 0, 24), "for documentation"),
    (v4(192, 88, 99, 0, 24), "a relay of 6to4"),
    (v4(192, 168, 0, 0, 16), "private"),
    (v4(198, 18, 0, 0, 15), "for benchmarks"),
    (v4(198, 51, 100, 0, 24), "for documentation"),
    (v4(203, 0, 113, 0, 24), "for documentation"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    (v4(240, 0, 0, 0, 4), "reserved"),
    (v4(168, 63, 129, 16, 32), "a service of the cloud's host"),
];

/// The special networks inside and outside of 2000::/3. All else outside of it is not assigned.
const SPECIAL_V6: &[(Ipv6Net, &str)] = &[
    (
        Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128),
        "unspecified",
    ),
    (
        Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128),
        "of this machine",
    ),
    (
        Ipv6Net::new_assert(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), 96),
        "an IPv4 address in IPv6",
    ),
    (v6(0x64, 0xff9b, 0, 96), "translated to IPv4 (NAT64)"),
    (v6(0x64, 0xff9b, 1, 48), "translated to IPv4 (NAT64)"),
    (v6(0x100, 0, 0, 64), "discarded"),
    (v6(0x2001, 0, 0, 32), "a tunnel to IPv4 (Teredo)"),
    (v6(0x2001, 2, 0, 48), "for benchmarks"),
    (v6(0x2001, 0, 0, 23), "reserved for protocols"),
    (v6(0x2001, 0xdb8, 0, 32), "for documentation"),
    (v6(0x2002, 0, 0, 16), "a tunnel to IPv4 (6to4)"),
    (v6(0x3fff, 0, 0, 20), "for documentation"),
    (v6(0xfc00, 0, 0, 7), "private"),
    (v6(0xfe80, 0, 0, 10), "link-local"),
    (v6(0xfec0, 0, 0, 10), "private"),
    (v6(0xff00, 0, 0, 8), "multicast"),
];

const GLOBAL_V6: Ipv6Net = v6(0x2000, 0, 0, 3);

fn special_v4(address: Ipv4Addr) -> Option<&'static str> {
    let special = SPECIAL_V4.iter().find(|(net, _)| net.contains(&address));
    special.map(|(_, what)| *what)
}

fn special_v6(address: Ipv6Addr) -> Option<&'static str> {
    let special = SPECIAL_V6.iter().find(|(net, _)| net.contains(&address));
    let unassigned = (!GLOBAL_V6.contains(&address)).then_some("not assigned");
    special.map(|(_, what)| *what).or(unassigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(allow: &[&str], development: bool) -> Class {
        Class::Operator {
            allow: allow.iter().map(|net| net.parse().unwrap()).collect(),
            http: false,
            development,
        }
    }

    fn allows(class: &Class, address: &str) -> bool {
        class.check(address.parse().unwrap()).is_ok()
    }

    #[test]
    fn public_addresses_are_allowed() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.1",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "168.63.129.15",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2606:4700:4700::1111",
            "2a00:1450:4001:810::200e",
            "3ffe::1",
        ] {
            assert!(allows(&Class::Public, address), "{address}");
            assert!(allows(&operator(&[], false), address), "{address}");
        }
    }

    #[test]
    fn special_addresses_are_refused() {
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.255.255.255",
            "100.64.0.0",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.170",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "::",
            "::1",
            "::2",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::8.8.8.8",
            "64:ff9b:1::a00:1",
            "100::1",
            "2001::1",
            "2001:0:7f00:1::",
            "2001:2::1",
            "2001:20::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:808:808::1",
            "3fff::1",
            "3fff:fff:ffff::1",
            "4000::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        ] {
            assert!(!allows(&Class::Public, address), "{address}");
            assert!(!allows(&operator(&[], false), address), "{address}");
        }
    }

    #[test]
    fn the_operator_allows_networks_and_only_these() {
        let class = operator(&["10.1.0.0/16", "fd00:1::/32"], false);
        for address in ["10.1.2.3", "fd00:1::5", "8.8.8.8"] {
            assert!(allows(&class, address), "{address}");
        }
        for address in [
            "10.2.0.1",
            "127.0.0.1",
            "169.254.169.254",
            // It would connect to 10.1.2.3, but is another way to say so.
            "::ffff:10.1.2.3",
            "64:ff9b::10.1.2.3",
            "2002:a01:203::",
            "fd00:2::5",
        ] {
            assert!(!allows(&class, address), "{address}");
        }
    }

    #[test]
    fn development_allows_this_machine_and_only_it() {
        let class = operator(&[], true);
        for address in ["127.0.0.1", "127.1.2.3", "::1"] {
            assert!(allows(&class, address), "{address}");
        }
        for address in [
            "0.0.0.0",
            "::",
            "10.0.0.1",
            "::ffff:127.0.0.1",
            "192.168.1.1",
        ] {
            assert!(!allows(&class, address), "{address}");
        }
        let here = Some("127.0.0.1".parse().unwrap());
        let public = Some("8.8.8.8".parse().unwrap());
        assert!(class.allows_http(here));
        assert!(!class.allows_http(public) && !class.allows_http(None));
        assert!(!operator(&[], false).allows_http(here));
        assert!(!Class::Public.allows_http(here));
    }

    #[test]
    fn a_refusal_says_why() {
        let text = |address: &str| {
            let refused = Class::Public.check(address.parse().unwrap());
            refused.unwrap_err().to_string()
        };
        assert_eq!(text("169.254.169.254"), "169.254.169.254 is link-local");
        assert_eq!(
            text("2001:0:7f00:1::"),
            "2001:0:7f00:1:: is a tunnel to IPv4 (Teredo)"
        );
        assert_eq!(text("4000::1"), "4000::1 is not assigned");
    }
}
