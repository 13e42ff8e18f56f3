//! Names of files as people gave them.

use super::{characters::strays, cut_before, normalized, shows_something};

/// Bytes of a name.
const NAME_BYTES_MAX: usize = 255;
/// The name of a file whose own name has nothing that may be shown.
const NAMELESS: &str = "file";

/// Returns a name without what could mislead people or programs: folders, control characters, and invisible characters
/// or those that change the direction of text, which could show `exe.png` for a name that ends with `gnp.exe`.
#[must_use]
pub fn file_name(name: &str) -> String {
    let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut clean = without_strays(&normalized(name));
    clean.retain(|c| !"<>:\"|?*".contains(c));
    loop {
        // What a character needed may be gone with the one before it, and the end may have been cut before.
        let trimmed = clean.trim_matches(|c: char| c == '.' || c.is_whitespace());
        let end = trimmed.floor_char_boundary(NAME_BYTES_MAX);
        let cut = if end < trimmed.len() {
            cut_before(trimmed, end)
        } else {
            trimmed
        };
        let next = without_strays(&normalized(cut));
        if next == clean {
            break;
        }
        clean = next;
    }
    if shows_something(&clean) {
        clean
    } else {
        NAMELESS.to_owned()
    }
}

fn without_strays(name: &str) -> String {
    let mut clean = String::with_capacity(name.len());
    let mut end = 0;
    for (at, c, _) in strays(name) {
        clean.push_str(&name[end..at]);
        end = at + c.len_utf8();
    }
    clean.push_str(&name[end..]);
    clean
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
            ("\u{200b}\u{2800}", "file"),
            ("ca\u{200d}t\u{ad}.png", "cat.png"),
            ("cafe\u{301}.png", "café.png"),
            ("日本語.pdf", "日本語.pdf"),
            ("نامه\u{200c}ها.pdf", "نامه\u{200c}ها.pdf"),
            ("👩\u{200d}💻.png", "👩\u{200d}💻.png"),
        ] {
            assert_eq!(file_name(given), shown);
        }
        assert_eq!(file_name(&"é".repeat(300)).len(), 254);
        assert_eq!(file_name(&"👩\u{200d}💻".repeat(30)).len(), 253);
    }
}
