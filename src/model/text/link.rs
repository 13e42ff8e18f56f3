//! Links of messages: their addresses, and names that could show another address.

use std::net::Ipv4Addr;

use icu_normalizer::ComposingNormalizerBorrowed;
use url::Url;

use super::{
    Wrong,
    characters::{dots_turned, is_latin, is_mark, strays},
    check_short,
    top_level::is_top_level,
};

/// What names of files end with. A name that ends so is taken for a file, also if a host could end so.
const FILE_ENDS: &[&str] = &[
    "aac", "apk", "avi", "avif", "bmp", "bz", "css", "csv", "db", "doc", "docx", "dmg", "eml",
    "eps", "epub", "flac", "gif", "gz", "heic", "htm", "html", "ics", "ico", "ini", "iso", "java",
    "jpeg", "jpg", "js", "json", "key", "log", "md", "mkv", "mov", "mpeg", "mpg", "msg", "numbers",
    "odp", "ods", "odt", "ogg", "opus", "pages", "pdf", "php", "png", "ppt", "pptx", "psd", "py",
    "rar", "rs", "rst", "rtf", "sh", "sql", "svg", "tar", "tex", "tgz", "tif", "tiff", "toml",
    "ts", "tsv", "txt", "vcf", "wav", "webm", "webp", "xls", "xlsx", "xml", "xz", "yaml", "yml",
    "zip", "zst",
];

/// Checks the address of a link. It shows itself where the link has no name.
///
/// # Errors
/// [`Wrong::Address`] if it is not the complete address of a host, or has something that hides the host.
pub fn link_url(url: &str) -> Result<(), Wrong> {
    let parsed = parse(url).ok_or(Wrong::Address)?;
    let shows_host =
        strays(url).next().is_none() && !url.contains(|c: char| c == '\\' || c.is_whitespace());
    if shows_host && !names_user(&parsed) {
        Ok(())
    } else {
        Err(Wrong::Address)
    }
}

/// Checks the name of a link to `url`.
///
/// # Errors
/// [`Wrong::OtherAddress`] if it shows an address, and the link does not lead there; if it shows nothing, or has a
/// character that is not allowed in a short text, or marks of direction beside a dot.
pub fn link_name(name: &str, url: &str) -> Result<(), Wrong> {
    check_short(name)?;
    let to = parse(url).ok_or(Wrong::Address)?;
    // Forms of one letter or dot that look alike, such as wide ones, are the same in an address.
    let name = ComposingNormalizerBorrowed::new_nfkc().normalize(name);
    let is_sign = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
    if dots_turned(&name, is_sign).next().is_some() {
        return Err(Wrong::Direction);
    }
    let name = name.trim_end_matches(|c: char| !c.is_alphanumeric());
    let mut words = name.split_whitespace().rev().enumerate();
    if words.any(|(from_end, word)| word_misleads(word, &to, from_end == 0)) {
        Err(Wrong::OtherAddress)
    } else {
        Ok(())
    }
}

fn parse(url: &str) -> Option<Url> {
    let starts = |scheme| {
        let start = url.get(..str::len(scheme));
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    // The parser would also accept an address with fewer slashes.
    let parsed = Url::parse(url).ok().filter(|url| url.has_host());
    parsed.filter(|_| starts("https://") || starts("http://"))
}

/// Returns whether a word shows an address to which the link does not lead. `ends_name` if no other word follows.
fn word_misleads(word: &str, to: &Url, ends_name: bool) -> bool {
    let word =
        word.trim_matches(|c: char| "()[]{}<>\"'.,;!".contains(c) || "«»„“”‘’‹›".contains(c));
    // The scheme may also be another one, such as ftp.
    let (scheme, address) = word.split_once("://").unwrap_or(("", word));
    let shows_link = shows(address, to);
    if shows_link && !scheme.contains('.') {
        return false;
    }
    if !shows_link && word.contains("://") {
        return true;
    }
    // No host has two dots in a row, but one may follow them.
    let word = &word.replace("..", "…");
    let mut start = 0;
    word.split_inclusive(|c| !may_be_in_host(c)).any(|part| {
        let text = part.trim_end_matches(|c| !may_be_in_host(c));
        let (before, after) = (&word[..start], &word[start + text.len()..]);
        start += part.len();
        let is_last = ends_name && after.is_empty();
        Piece::new(before, text, after, is_last).misleads(to)
    })
}

/// Returns whether a character may be in the name of a host: one of a letter, a digit, a hyphen and a dot, or a mark or
/// joiner of a letter.
fn may_be_in_host(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '.' | '。' | '\u{200c}' | '\u{200d}') || is_mark(c)
}

/// A part of a word that has only characters of hosts.
struct Piece<'a> {
    text: &'a str,
    /// The port and path after it, if there are any.
    path: &'a str,
    /// Whether what is around it says that it is a host, such as `//`.
    is_announced: bool,
    /// Whether the name ends with it.
    is_last: bool,
}

impl<'a> Piece<'a> {
    fn new(before: &str, text: &'a str, after: &'a str, is_last: bool) -> Self {
        let text = text.trim_matches(['.', '。', '-']);
        let has_path = after.starts_with('/');
        let has_port =
            after.starts_with(':') && after[1..].starts_with(|c: char| c.is_ascii_digit());
        let has_user = before.len() > 1 && before.ends_with('@');
        let is_lower = !text.contains(char::is_uppercase);
        Self {
            text,
            path: if has_path || has_port { after } else { "" },
            is_announced: has_user
                || before.ends_with("//")
                || text.to_lowercase().starts_with("www.")
                || (is_lower && (has_path || has_port)),
            is_last,
        }
    }

    /// Returns whether it shows a host, and the link does not lead there.
    fn misleads(&self, to: &Url) -> bool {
        let host = self.host();
        if host.as_ref().is_some_and(|host| shows(host, to)) {
            return false;
        }
        // In scripts without spaces, a host may be between other letters.
        let splits = |c| c != '。' && !is_latin(c);
        if !self.text.contains(splits) {
            return host.is_some();
        }
        let parts = self.text.split(splits);
        let parts = parts.map(|text| Piece::new("", text, "", self.is_last));
        let hosts: Vec<String> = parts.filter_map(|part| part.host()).collect();
        (hosts.is_empty() && host.is_some()) || hosts.iter().any(|host| !shows(host, to))
    }

    /// Returns the host that it shows, with its port and path. After the host may be other labels (`example.org.Then`).
    fn host(&self) -> Option<String> {
        if self.text.parse::<Ipv4Addr>().is_ok() {
            return Some(format!("{}{}", self.text, self.path));
        }
        let labels: Vec<&str> = self.text.split(['.', '。']).collect();
        let (last, rest) = labels.split_last().filter(|(_, rest)| !rest.is_empty())?;
        let lower = last.to_lowercase();
        let is_file = !self.is_announced && FILE_ENDS.contains(&&*lower);
        if is_file && (self.is_last || !is_top_level(last)) {
            return None;
        }
        let could_be_domain =
            last.chars().count() >= 2 && !last.contains(|c: char| c.is_ascii_digit());
        if self.ends_host(last) || (self.is_announced && could_be_domain) {
            return Some(format!("{}{}", labels.join("."), self.path));
        }
        // `example.org-then` shows a host too.
        let before_hyphen = last.split('-').next().unwrap_or_default();
        if self.ends_host(before_hyphen) {
            return Some(format!("{}.{before_hyphen}", rest.join(".")));
        }
        let end = (1..rest.len())
            .rev()
            .find(|end| self.ends_host(rest[*end]))?;
        Some(rest[..=end].join("."))
    }

    /// Returns whether a host may end with this label. The dot of Chinese and Japanese ends sentences: only a domain in
    /// Latin after it makes a host.
    fn ends_host(&self, label: &str) -> bool {
        is_top_level(label) && (label.is_ascii() || !self.text.contains('。'))
    }
}

/// Returns whether a link leads to this address without a scheme.
fn shows(address: &str, to: &Url) -> bool {
    let shown = Url::parse(&format!("https://{address}"));
    shown.is_ok_and(|shown| !names_user(&shown) && leads_to(to, &shown))
}

fn names_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// Returns whether a link leads to the address that its name shows: to the same host, and not outside of the path.
fn leads_to(to: &Url, shown: &Url) -> bool {
    let host = |url: &Url| {
        let host = url.host_str().unwrap_or_default().trim_end_matches('.');
        host.strip_prefix("www.").unwrap_or(host).to_owned()
    };
    let path = shown.path().trim_end_matches('/').to_lowercase();
    let is_within = to.path().to_lowercase().starts_with(&path);
    host(to) == host(shown) && is_within && (shown.port().is_none() || shown.port() == to.port())
}
