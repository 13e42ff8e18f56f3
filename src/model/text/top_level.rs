//! Top-level domains with which the name of a link may show a host. The list has all countries, and of the others those
//! that many hosts have: a missing one is a host that is not recognized, and an uncommon word in it refuses a name.

/// Domains of countries. Each has two letters.
const COUNTRIES: &str = "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt \
    bw by bz ca cc cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm \
    fo fr ga gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo \
    jp ke kg kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt \
    mu mv mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw \
    sa sb sc sd se sg sh si sj sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua \
    ug uk us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw";

/// Other domains, and the one of examples.
const GENERIC: &str = "academy aero agency app arpa asia bank berlin bet bid biz blog bond buzz cam casino cat center cfd \
    chat city click cloud club codes com community company consulting coop credit cyou design dev digital edu education \
    email energy eus example exchange expert finance financial foundation fun fund gal gallery games global gmbh gov group \
    guru hamburg health host hosting house icu info insurance int international jobs land law legal life link live loan \
    loans lol london ltd market marketing media mil mobi money monster mov museum net network news ninja nyc one online \
    onion org page paris partners photography photos plus poker press pro quest red rent restaurant review rocks sale sbs \
    school services shop site social software solutions space store stream studio support swiss systems team tech \
    technology tips today tokyo tools top tours trade training travel university vegas ventures vip web webcam website \
    wien wiki win work works world wtf xxx xyz zip zone";

/// Domains in other scripts.
const INTERNATIONAL: &str = "рф рус москва онлайн сайт орг ком бг бел укр срб мкд мон қаз ею ελ ευ հայ გე 中国 中國 公司 网络 \
    网址 网站 在线 中文网 香港 台湾 台灣 澳門 新加坡 移动 政务 公益 商城 集团 商店 한국 닷컴 닷넷 みんな コム ไทย คอม ລາວ भारत भारतम् भारोत संगठन कॉम नेट \
    বাংলা ভারত ਭਾਰਤ ભારત ଭାରତ இந்தியா இலங்கை சிங்கப்பூர் భారత్ ಭಾರತ ഭാരതം ලංකා قطر مصر ایران السعودية امارات الاردن الجزائر المغرب تونس عمان \
    عراق فلسطين سورية سودان مليسيا پاکستان بھارت البحرين موريتانيا موقع شبكة بازار كوم ישראל קום";

/// Returns whether a label is a top-level domain. `NET` in capitals is none (`ASP.NET`), and neither are two letters
/// with one capital, the first: a sentence begins there (`Done.It works`).
pub(super) fn is_top_level(label: &str) -> bool {
    if label == "NET" {
        return false;
    }
    let begins_sentence = label.len() == 2
        && label.as_bytes()[0].is_ascii_uppercase()
        && label.as_bytes()[1].is_ascii_lowercase();
    let lower = label.to_lowercase();
    let mut lists = [COUNTRIES, GENERIC, INTERNATIONAL].into_iter();
    let is_listed = lists.any(|list| list.split_ascii_whitespace().any(|domain| domain == lower));
    (is_listed && !begins_sentence) || lower.starts_with("xn--")
}
