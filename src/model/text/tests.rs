use super::*;

/// A text, and what happens with it as a body, a name, a description (`alt`), a file's name, an emoji, and a link's name.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    about: String,
    text: String,
    body: bool,
    /// The stored form of the name. `None` if it is refused.
    name: Option<String>,
    alt: bool,
    file: String,
    emoji: Option<String>,
    link: bool,
}

/// The table that the tests of the running gateway read too.
fn rows() -> Vec<Row> {
    serde_json::from_str(include_str!("../../../tests/golden/texts.json")).unwrap()
}

#[test]
fn each_text_of_the_table_is_what_the_table_says() {
    let rows = rows();
    assert!(rows.len() >= 60);
    for row in rows {
        let Row { about, text, .. } = &row;
        assert_eq!(check_body(text).is_ok(), row.body, "body: {about}");
        assert_eq!(name(text).ok(), row.name, "name: {about}");
        assert_eq!(check_alt(text).is_ok(), row.alt, "alt: {about}");
        assert_eq!(file_name(text), row.file, "file: {about}");
        assert_eq!(emoji(text).ok(), row.emoji, "emoji: {about}");
        let link = link_name(text, "https://example.org/cat.png");
        assert_eq!(link.is_ok(), row.link, "link: {about}");
    }
}

#[test]
fn a_stored_form_is_its_own_stored_form() {
    for row in rows() {
        if let Some(stored) = row.name {
            assert_eq!(name(&stored).as_ref(), Ok(&stored));
        }
        if let Some(stored) = row.emoji {
            assert_eq!(emoji(&stored).as_ref(), Ok(&stored));
            assert_eq!(name(&stored).as_ref(), Ok(&stored));
        }
        assert_eq!(file_name(&row.file), row.file);
    }
}

#[test]
fn an_emoji_has_one_stored_form() {
    for (given, stored) in [
        ("👍", "👍"),
        ("👍\u{fe0f}", "👍"),
        ("👍\u{fe0e}", "👍"),
        ("❤", "❤\u{fe0f}"),
        ("❤\u{fe0f}", "❤\u{fe0f}"),
        ("1\u{20e3}", "1\u{fe0f}\u{20e3}"),
        ("#\u{fe0f}\u{20e3}", "#\u{fe0f}\u{20e3}"),
        ("👍🏽", "👍🏽"),
        ("☝\u{fe0f}🏽", "☝🏽"),
        ("🏳\u{200d}🌈", "🏳\u{fe0f}\u{200d}🌈"),
        ("👁\u{200d}🗨", "👁\u{fe0f}\u{200d}🗨\u{fe0f}"),
        ("🧑🏽\u{200d}⚕", "🧑🏽\u{200d}⚕\u{fe0f}"),
        ("🇺🇦", "🇺🇦"),
        (TAG_FLAG, TAG_FLAG),
        (":shipit:", ":shipit:"),
        (":+1:", ":+1:"),
    ] {
        assert_eq!(emoji(given).as_deref(), Ok(stored), "{given:?}");
        assert_eq!(emoji(stored).as_deref(), Ok(stored), "{given:?}");
    }
}

const TAG_FLAG: &str = "🏴\u{e0067}\u{e0062}\u{e0073}\u{e0063}\u{e0074}\u{e007f}";

#[test]
fn what_is_no_emoji_is_refused() {
    for text in [
        "",
        "x",
        "1",
        "#",
        "ok",
        "👍👍",
        "👍 ",
        "🇺",
        "🇺🇦🇺🇦",
        "🏽",
        "🚗🏽",
        "\u{fe0f}",
        "👍\u{200d}",
        "\u{200d}👍",
        "👍\u{fe0f}\u{fe0f}",
        "👍🏽🏽",
        "::",
        ":Party:",
        ":a b:",
        ":é:",
        "https://evil.example",
        "__proto__",
        "👍\u{200b}",
        "🏴\u{e0075}\u{e0073}\u{e0074}\u{e0078}\u{e007f}",
        "x\u{20e3}",
    ] {
        assert_eq!(emoji(text), Err(Wrong::Emoji), "{text:?}");
    }
    let long = format!(":{}:", "x".repeat(63));
    assert_eq!(emoji(&long), Err(Wrong::Emoji));
    // Each of the hearts gets a selector, and the whole is too long.
    assert_eq!(emoji(&["❤"; 10].join("\u{200d}")), Err(Wrong::Emoji));
}

/// Names that show no host but that of `https://example.org/docs/cat.png`.
const HARMLESS: &[&str] = &[
    "cat.png",
    "Our cat, asleep",
    "example.org",
    "Example.org/docs",
    "www.example.org",
    "https://example.org/docs/cat.png",
    "the docs (example.org)",
    "v1.2",
    "12:30",
    "report final.pdf",
    "a/b",
    "@alice",
    "me@example.org",
    "e.g. this",
    "Fa.Müller 3.pdf",
    "猫.png",
    "これは猫です。犬もいます",
    "你好。世界",
    "今日はWordです。Excelも",
    "Node.js guide",
    "Node.js/Express",
    "ASP.NET tutorial",
    "report.pdf (draft)",
    "manual.de.pdf",
    "main.rs",
    "notes.md 📎",
    "Done.See notes",
    "Done.It works",
    "St.Gallen map",
    "St.Gallen/Zürich",
    "hola.mañana",
    "wait... what",
    "@alice.smith",
    "שפת C++\u{200f}. היא",
    "*example.org*",
    "example.org, our docs",
    "詳細はexample.orgを参照",
    "「example.org」",
    "see example.org/docs.",
];
/// Names that show another one.
const OTHER_HOSTS: &[&str] = &[
    "https://bank.example",
    "http://bank.example/cat.png",
    "bank.example",
    "BANK.example/login",
    "www.bank.sh",
    "log in at bank.example",
    "bank。example",
    "ｂａｎｋ．ｅｘａｍｐｌｅ",
    "me@bank.example",
    "192.0.2.1",
    "пример.рф",
    "https://example.org.bank.example",
    "example.org/other",
    "ftp://bank.example/cat.png",
    "https://example.org@bank.example",
    "bank.example:443",
    "https:// bank",
    "https://example.org:8443/docs",
    // Signs in a word do not hide a host.
    "*paypal.com*",
    "_paypal.com_",
    "paypal.com|login",
    "paypal.com\\login",
    "paypal.com,login",
    "login:paypal.com",
    "see/paypal.com",
    "url=paypal.com",
    "paypal.com~",
    "[paypal.com](x)",
    "//paypal.com",
    "my_site.paypal.com",
    "paypal.com, your invoice.pdf",
    "paypal.com@example.org",
    "paypal.com://example.org",
    "“paypal.com”",
    "paypal.com…",
    "paypal.com–login",
    "wait...paypal.com",
    "-paypal.com-",
    "paypal.com-login",
    "paypal.com.Login",
    "PAYPAL.COM",
    "PayPal.com",
    "paypal。com",
    "これはpaypal.comです",
    "これはpaypal.com",
    "сайтpaypal.comом",
    "bank.rocks/login",
    "bank.rocks:443",
    "me@bank.rocks",
    "www.bank.rocks",
    "main.rs, the log",
    "中文.中国",
    // The end of the URL's path, which the sender chooses, does not make a name that of a file.
    "paypal.png/login",
];

#[test]
fn a_link_shows_no_other_address() {
    let to = "https://example.org/docs/cat.png";
    for allowed in HARMLESS {
        assert_eq!(link_name(allowed, to), Ok(()), "{allowed:?}");
    }
    for refused in OTHER_HOSTS {
        assert_eq!(
            link_name(refused, to),
            Err(Wrong::OtherAddress),
            "{refused:?}"
        );
    }
    for (name, wrong) in [
        (" ", Wrong::Blank),
        ("a\u{202e}b", Wrong::Direction),
        ("a\nb", Wrong::Control),
        ("א com\u{200f}.\u{200f}paypal", Wrong::Direction),
    ] {
        assert_eq!(link_name(name, to), Err(wrong));
    }
    for (name, to) in [
        ("bank.example/a.pdf", "https://example.org/other/a.pdf"),
        // The sender chooses the path.
        ("paypal.com", "https://evil.example/paypal.com"),
        ("bank.de", "https://evil.example/x.de"),
    ] {
        assert_eq!(link_name(name, to), Err(Wrong::OtherAddress), "{name:?}");
    }
    // An address is its own name.
    for url in [
        "https://my_site.example.org/a..b/paypal.com?c=https://bank.example#d",
        "https://example.org/@bank.de/x",
        "http://example.org:8080/",
        "https://пример.рф/ё",
    ] {
        assert_eq!(link_name(url, url), Ok(()), "{url:?}");
    }
}

#[test]
fn a_joiner_is_beside_a_letter_of_its_script() {
    for allowed in [
        "PDF\u{200c}ها",
        "10\u{200c}ها",
        "«کتاب»\u{200c}ها",
        "(کتاب)\u{200c}ها",
        "\u{200d}ه",
        "ᦀᦁ\u{200b}ᦀ",
        "ᨠᨡ\u{200b}ᨠ",
        "10\u{200b}คน",
        "ᮞᮥ\u{200b}ᮞ",
    ] {
        assert_eq!(name(allowed).as_deref(), Ok(allowed));
        assert_eq!(file_name(allowed), allowed);
    }
    for refused in [
        "PDF\u{200c}\u{200c}ها",
        "PDF\u{200c}s",
        "ไทย\u{180e}ไทย",
        "ไทย\u{200d}ไทย",
        "\u{200b}ไทย",
        "a\u{180e}ᠠ",
        "می\u{200b}خواهم",
    ] {
        assert_eq!(name(refused), Err(Wrong::Invisible), "{refused:?}");
    }
    // One of two in a row stays.
    assert_eq!(file_name("PDF\u{200c}\u{200c}ها"), "PDF\u{200c}ها");
    for blank in ["\u{13441}", "\u{13442}\u{13441}"] {
        assert!(name(blank).is_err() && check_body(blank).is_err());
    }
}

#[test]
fn the_address_of_a_link_shows_its_host() {
    for url in [
        "https://example.org",
        "http://example.org:8080/a?b#c",
        "https://пример.рф/ё",
        "HTTPS://EXAMPLE.ORG/",
        "https://192.0.2.1/",
    ] {
        assert_eq!(link_url(url), Ok(()), "{url:?}");
    }
    for url in [
        "",
        "example.org",
        "javascript:alert(1)",
        "ftp://example.org",
        "https:example.org",
        "https://",
        "https:///",
        "//example.org",
        "https://bank.example@evil.example/",
        "https://a:b@evil.example/",
        "https://bank.example\\@evil.example",
        "https://evil.example/\u{202e}gpj",
        "https://evil.example/ a",
        " https://evil.example",
        "https://evil.example/\n",
        "https://[",
    ] {
        assert_eq!(link_url(url), Err(Wrong::Address), "{url:?}");
    }
}

#[test]
fn texts_are_cut_between_clusters() {
    let family = "👨\u{200d}👩\u{200d}👧\u{200d}👦";
    assert_eq!(cut("abc", 3), "abc");
    assert_eq!(cut("abcd", 3), "abc");
    assert_eq!(cut("ab\r\nc", 3), "ab");
    assert_eq!(cut("abce\u{301}f", 4), "abc");
    assert_eq!(cut("éé", 1), "é");
    assert_eq!(cut(&format!("a{family}{family}"), 10), format!("a{family}"));
    assert_eq!(cut("🇺🇦🇺🇦🇺🇦", 3), "🇺🇦");
    assert_eq!(cut("नमस्ते", 4), "नम");
    assert_eq!(cut(family, 3), "👨\u{200d}👩", "nothing is shorter");
    assert_eq!(cut("", 3), "");
}

#[test]
fn random_texts_have_the_properties_of_any_text() {
    let parts: Vec<char> = "a:/@. é\u{301}م\u{640}कक\u{94d}ក👍❤👨🏽🏴🇺🇦1#木ᠮ"
        .chars()
        .chain("\u{0}\n\u{ad}\u{200b}\u{200c}\u{200d}\u{200f}\u{202e}\u{fe0e}\u{fe0f}\u{20e3}\u{180b}\u{e0067}\u{e007f}\u{2800}".chars())
        .collect();
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % below
    };
    for _ in 0..4_000 {
        let length = random(14);
        let text: String = (0..length).map(|_| parts[random(parts.len())]).collect();
        if let Ok(stored) = name(&text) {
            assert_eq!(name(&stored).as_ref(), Ok(&stored), "{text:?}");
            assert!(check_body(&text).is_ok() && check_alt(&text).is_ok());
        }
        if let Ok(stored) = emoji(&text) {
            assert_eq!(emoji(&stored).as_ref(), Ok(&stored), "{text:?}");
            assert!(
                is_reaction_key(&stored) && name(&stored).is_ok(),
                "{text:?}"
            );
            let clusters = unicode_segmentation::UnicodeSegmentation::graphemes(&*stored, true);
            assert!(clusters.count() == 1 || stored.starts_with(':'), "{text:?}");
        }
        let file = file_name(&text);
        assert_eq!(file_name(&file), file, "{text:?}");
        let shorter = cut(&text, random(14));
        assert!(text.starts_with(shorter));
        let _ = (link_name(&text, "https://example.org/"), link_url(&text));
        let _ = link_url(&format!("https://{text}"));
    }
}
