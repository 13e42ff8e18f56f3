//! Names of files as people gave them.

/// Bytes of a name.
const NAME_BYTES_MAX: usize = 255;
/// Bytes of an extension with its dot. What is longer is no extension.
const EXTENSION_BYTES_MAX: usize = 33;
/// The name of a file whose own name has nothing that may be shown.
const NAMELESS: &str = "file";

/// Returns a name without what could mislead people or programs: folders, control characters, and characters that change
/// the direction of text, which could show `exe.png` for a name that ends with `gnp.exe`.
#[must_use]
pub fn clean(name: &str) -> String {
    let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let clean: String = name.chars().filter(|c| !is_misleading(*c)).collect();
    let clean = shortened(trimmed(&clean));
    if clean.is_empty() {
        NAMELESS.to_owned()
    } else {
        clean
    }
}

fn trimmed(name: &str) -> &str {
    name.trim_matches(|c: char| c == '.' || c.is_whitespace())
}

/// Returns a name of at most [`NAME_BYTES_MAX`] bytes. The stem is cut, so that the extension stays.
fn shortened(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX {
        return name.to_owned();
    }
    let extension = name.rfind('.').map_or("", |dot| &name[dot..]);
    let is_short =
        extension.len() <= EXTENSION_BYTES_MAX && !extension.contains(char::is_whitespace);
    let extension = if is_short { extension } else { "" };
    let stem = &name[..name.len() - extension.len()];
    let stem = trimmed(&stem[..stem.floor_char_boundary(NAME_BYTES_MAX - extension.len())]);
    format!("{stem}{extension}")
}

fn is_misleading(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_invisible =
        matches!(c, '\u{200b}'..='\u{200d}' | '\u{2028}'..='\u{2029}' | '\u{2060}' | '\u{feff}');
    c.is_control() || turns || is_invisible || "<>:\"|?*".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_mislead() {
        for (given, shown) in [
            ("a cat.png", "a cat.png"),
            ("../../etc/passwd", "passwd"),
            ("C:\\Users\\me\\cat.png", "cat.png"),
            ("invoice\u{202e}gnp.exe", "invoicegnp.exe"),
            ("a\r\nb: c\u{0}.png", "ab c.png"),
            (".htaccess", "htaccess"),
            (" . .htaccess. .", "htaccess"),
            ("  ..  ", "file"),
            ("", "file"),
            ("日本語.pdf", "日本語.pdf"),
        ] {
            assert_eq!(clean(given), shown);
        }
    }

    #[test]
    fn a_long_name_keeps_its_extension() {
        let long = |stem: &str, count: usize, end: &str| clean(&(stem.repeat(count) + end));
        assert_eq!(long("n", 276, ".pdf"), "n".repeat(251) + ".pdf");
        assert_eq!(long("n", 251, ".pdf"), "n".repeat(251) + ".pdf");
        // At a whole character: 251 bytes are 125 of them and a half.
        assert_eq!(long("é", 140, ".pdf"), "é".repeat(125) + ".pdf");
        assert_eq!(long("n", 300, ".tar.gz"), "n".repeat(252) + ".gz");
        assert_eq!(long("n", 300, ".文書"), "n".repeat(248) + ".文書");
        assert_eq!(
            clean(&format!("{} {}.pdf", "n".repeat(250), "m".repeat(20))),
            "n".repeat(250) + ".pdf"
        );
        // Without an extension, or with what is none.
        assert_eq!(long("é", 300, ""), "é".repeat(127));
        assert_eq!(
            long("a.", 1, &"n".repeat(300)),
            "a.".to_owned() + &"n".repeat(253)
        );
        assert_eq!(long("n", 300, ". And so on"), "n".repeat(255));
        assert_eq!(long("n", 300, ".pdf. ."), "n".repeat(251) + ".pdf");
    }
}
