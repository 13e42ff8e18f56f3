//! Links of messages: their addresses, and names that could show another address.

use icu_normalizer::ComposingNormalizerBorrowed;
use url::Url;

use super::{Wrong, characters::strays, check_short};

/// What names of files end with, among the words that could also be the end of a host. A name with another end is taken
/// for a host.
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
    let names_user = !parsed.username().is_empty() || parsed.password().is_some();
    if shows_host && !names_user {
        Ok(())
    } else {
        Err(Wrong::Address)
    }
}

/// Checks the name of a link to `url`.
///
/// # Errors
/// [`Wrong::OtherAddress`] if it shows an address, and the link does not lead there; if it shows nothing, or has a
/// character that is not allowed in a short text.
pub fn link_name(name: &str, url: &str) -> Result<(), Wrong> {
    check_short(name)?;
    let to = parse(url).ok_or(Wrong::Address)?;
    // Forms of one letter or dot that look alike, such as wide ones, are the same in an address.
    let name = ComposingNormalizerBorrowed::new_nfkc()
        .normalize(name)
        .to_lowercase()
        .replace('。', ".");
    let is_file = !name.contains("://") && ends_as_file(&name, &to);
    let mut words = name.split_whitespace();
    let misleads = |word: &str| {
        let shown = shown_address(word, is_file);
        shown.is_some_and(|shown| !Url::parse(&shown).is_ok_and(|shown| leads_to(&to, &shown)))
    };
    if words.any(misleads) {
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

/// Returns whether a name ends like that of a file, or like the path of the link.
fn ends_as_file(name: &str, to: &Url) -> bool {
    let Some((_, end)) = name.rsplit_once('.') else {
        return false;
    };
    let path = to.path().to_lowercase();
    FILE_ENDS.contains(&end) || path.rsplit_once('.').is_some_and(|(_, last)| last == end)
}

/// Returns the address that a word shows. In the name of a file, a word with dots alone is none.
fn shown_address(word: &str, is_file: bool) -> Option<String> {
    let word =
        word.trim_matches(|c: char| "()[]{}<>\"'.,;!".contains(c) || "«»„“”‘’‹›".contains(c));
    if let Some((_, rest)) = word.split_once("://") {
        // Also an address of another scheme, such as ftp.
        return Some(format!("https://{rest}"));
    }
    let after_user = word.rsplit_once('@').map(|(_, host)| host);
    let shown = after_user.unwrap_or(word);
    let host_end = shown.find(['/', '?', '#', ':']);
    let host = &shown[..host_end.unwrap_or(shown.len())];
    let is_explicit = host.starts_with("www.") || host_end.is_some() || after_user.is_some();
    (looks_like_host(host) && (is_explicit || !is_file)).then(|| format!("https://{word}"))
}

/// Returns whether a word has labels with dots between them, and the last one could be a top-level domain, or is an
/// address of IPv4.
fn looks_like_host(word: &str) -> bool {
    let Some((rest, last)) = word.rsplit_once('.') else {
        return false;
    };
    let is_label = |label: &str| {
        !label.is_empty()
            && label
                .chars()
                .all(|c| c.is_alphanumeric() || c == '-' || !c.is_ascii())
    };
    let is_domain = last.chars().count() >= 2
        && last.chars().all(|c| c.is_alphabetic() || !c.is_ascii())
        || last.starts_with("xn--");
    let is_v4 = word.parse::<std::net::Ipv4Addr>().is_ok();
    is_v4 || (is_domain && is_label(last) && rest.split('.').all(is_label))
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
