//! Names of files as people gave them.

/// Bytes of a name.
const NAME_BYTES_MAX: usize = 255;
/// The name of a file whose own name has nothing that may be shown.
const NAMELESS: &str = "file";

/// Returns a name without what could mislead people or programs: folders, control characters, and characters that change
/// the direction of text, which could show `exe.png` for a name that ends with `gnp.exe`.
#[must_use]
pub fn clean(name: &str) -> String {
    let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut clean = String::new();
    for c in name.chars().filter(|c| !is_misleading(*c)) {
        if clean.len() + c.len_utf8() > NAME_BYTES_MAX {
            break;
        }
        clean.push(c);
    }
    let clean = clean.trim_matches(|c: char| c == '.' || c.is_whitespace());
    if clean.is_empty() {
        NAMELESS.to_owned()
    } else {
        clean.to_owned()
    }
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
        assert_eq!(clean(&"é".repeat(300)).len(), 254);
    }
}
