//! Names of files as people gave them.

use std::borrow::Cow;

use super::{
    characters::{dots_turned, strays},
    cut_before, normalized, shows_something,
};

/// Bytes of a name.
const NAME_BYTES_MAX: usize = 255;
/// Bytes of an extension with its dot. What is longer is no extension.
const EXTENSION_BYTES_MAX: usize = 33;
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
        let next = without_strays(&normalized(&shortened(trimmed(&clean))));
        let next = without(&next, dots_turned(&next, |c| !c.is_alphanumeric()));
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

fn trimmed(name: &str) -> &str {
    name.trim_matches(|c: char| c == '.' || c.is_whitespace())
}

/// Returns a name of at most [`NAME_BYTES_MAX`] bytes. The stem is cut, so that the extension stays.
fn shortened(name: &str) -> Cow<'_, str> {
    if name.len() <= NAME_BYTES_MAX {
        return name.into();
    }
    let extension = name.rfind('.').map_or("", |dot| &name[dot..]);
    let is_short =
        extension.len() <= EXTENSION_BYTES_MAX && !extension.contains(char::is_whitespace);
    let extension = if is_short { extension } else { "" };
    let stem = &name[..name.len() - extension.len()];
    let end = stem.floor_char_boundary(NAME_BYTES_MAX - extension.len());
    let stem = trimmed(cut_before(stem, end));
    format!("{stem}{extension}").into()
}

fn without_strays(name: &str) -> String {
    without(name, strays(name).map(|(at, ..)| at))
}

/// Returns a name without the characters at these places.
fn without(name: &str, places: impl Iterator<Item = usize>) -> String {
    let mut clean = String::with_capacity(name.len());
    let mut end = 0;
    for at in places {
        clean.push_str(&name[end..at]);
        end = name.ceil_char_boundary(at + 1);
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
            // These would be shown as `exe.pdf א`.
            ("א pdf\u{200f}.\u{200f}exe", "א pdf.exe"),
            ("א pdf\u{200f} - .exe", "א pdf - .exe"),
            ("א pdf.\u{61c}\u{200f}exe", "א pdf.exe"),
            ("שפת C++\u{200f} היא.pdf", "שפת C++\u{200f} היא.pdf"),
        ] {
            assert_eq!(file_name(given), shown);
        }
        assert_eq!(file_name(&"é".repeat(300)).len(), 254);
        assert_eq!(file_name(&"👩\u{200d}💻".repeat(30)).len(), 253);
    }

    #[test]
    fn a_long_name_keeps_its_extension() {
        let long = |stem: &str, count: usize, end: &str| file_name(&(stem.repeat(count) + end));
        assert_eq!(long("n", 276, ".pdf"), "n".repeat(251) + ".pdf");
        assert_eq!(long("n", 251, ".pdf"), "n".repeat(251) + ".pdf");
        // At a whole character: 251 bytes are 125 of them and a half.
        assert_eq!(long("é", 140, ".pdf"), "é".repeat(125) + ".pdf");
        // And at one as people see it: 251 bytes are 22 of them, and a woman.
        let coder = "👩\u{200d}💻";
        assert_eq!(long(coder, 30, ".pdf"), coder.repeat(22) + ".pdf");
        assert_eq!(long("n", 300, ".tar.gz"), "n".repeat(252) + ".gz");
        assert_eq!(long("n", 300, ".文書"), "n".repeat(248) + ".文書");
        assert_eq!(
            file_name(&format!("{} {}.pdf", "n".repeat(250), "m".repeat(20))),
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
