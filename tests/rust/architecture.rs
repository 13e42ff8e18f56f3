//! Checks the rules of ARCHITECTURE.md: which layers a layer may use, how long a file may be, what a pure file must not
//! do. Clippy checks how long a function may be (`clippy.toml`).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Modules that every layer may use.
const COMMON: &[&str] = &["model", "clock", "tasks", "msgpack"];

/// The layers, which are the folders of `src`, each with the other layers and modules that it may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("protocol", &[]),
    ("store", &[]),
    ("files", &[]),
    ("chat", &["store"]),
    ("fanout", &["protocol"]),
    ("cluster", &["protocol", "store", "chat", "fanout"]),
    ("consumers", &["protocol", "store", "chat", "cluster"]),
    (
        "gateway",
        &[
            "protocol",
            "store",
            "files",
            "chat",
            "fanout",
            "cluster",
            "consumers",
            "auth",
            "config",
        ],
    ),
];

/// The folders of `src/cluster`, each with the other ones that it may use. None may use the files beside them.
const CLUSTER: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("ring", &["wire"]),
    ("sockets", &["wire"]),
    ("home", &["wire", "ring", "sockets"]),
    ("inward", &["wire", "ring", "sockets", "home"]),
];

/// Lines of a file. A longer one probably holds two ideas.
const LINES_MAX: usize = 600;
/// Folders of code that people write, each with the extensions of its files.
const CODE: &[(&str, &[&str])] = &[
    ("src", &["rs"]),
    ("loadtest/src", &["rs"]),
    ("tests/rust", &["rs"]),
    ("tests/s3server/src", &["rs"]),
    ("tests/blackbox", &["py"]),
    ("tests/models", &["py"]),
    ("fuzz/fuzz_targets", &["rs"]),
    ("client-js/src", &["ts", "tsx"]),
    ("client-js/page/src", &["ts", "tsx", "css"]),
    ("client-js/test", &["ts", "tsx"]),
];

/// The Rust files in a folder and its subfolders: path and text.
fn sources(folder: &Path) -> Vec<(String, String)> {
    files(folder, &["rs"])
}

/// The files with these extensions in a folder and its subfolders: path and text.
fn files(folder: &Path, extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if path
            .extension()
            .is_some_and(|e| extensions.iter().any(|known| e == *known))
        {
            found.push((
                path.display().to_string(),
                fs::read_to_string(&path).unwrap(),
            ));
        }
    }
    found
}

/// The top-level modules that a text names, as `crate::module` or `crate::{module, …}`.
fn layers_used(text: &str) -> Vec<String> {
    let mut used = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 1;
            let mut word = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
                if depth == 1 && (c.is_alphanumeric() || c == '_') {
                    word.push(c);
                } else if !word.is_empty() {
                    used.push(std::mem::take(&mut word));
                }
            }
            used.extend((!word.is_empty()).then_some(word));
        } else {
            used.push(
                rest.chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect(),
            );
        }
    }
    used
}

#[test]
fn imports_point_one_way() {
    crate::enter_project();
    let layers: Vec<&str> = MAY_USE.iter().map(|(layer, _)| *layer).collect();
    for (layer, allowed) in MAY_USE {
        for (file, text) in sources(&Path::new("src").join(layer)) {
            for used in layers_used(&text) {
                let known = layers.contains(&used.as_str())
                    || ["auth", "config", "node"].contains(&used.as_str());
                let fine = !known
                    || used == *layer
                    || COMMON.contains(&used.as_str())
                    || allowed.contains(&used.as_str());
                assert!(
                    fine,
                    "{file} uses {used}, but {layer} may use only {allowed:?} and {COMMON:?}"
                );
            }
        }
    }
}

/// The modules below a folder, by path, each with its code without comments and tests.
fn modules(folder: &Path) -> BTreeMap<Vec<String>, String> {
    let mut modules = BTreeMap::new();
    for (file, text) in sources(folder) {
        let path = Path::new(&file).strip_prefix(folder).unwrap();
        let path = path.to_str().unwrap().trim_end_matches(".rs");
        let mut path: Vec<String> = path.split('/').map(Into::into).collect();
        if path.last().is_some_and(|name| name == "mod") {
            path.pop();
        }
        if path == ["lib"] || path == ["main"] {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        modules.insert(path, lines.collect::<Vec<_>>().join("\n"));
    }
    modules
}

/// The paths of the `use` tree at the beginning of the text, and the rest of the text.
fn paths_at(text: &str) -> (Vec<Vec<String>>, &str) {
    if let Some(mut rest) = text.strip_prefix('{') {
        let mut all = Vec::new();
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
            match rest.strip_prefix('}') {
                Some(rest) => return (all, rest),
                None if rest.is_empty() => return (all, rest),
                None => {}
            }
            let before = rest.len();
            let (some, after) = paths_at(rest);
            all.extend(some);
            rest = if after.len() < before {
                after
            } else {
                &rest[1..]
            };
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let (word, rest) = text.split_at(end.unwrap_or(text.len()));
    if word.is_empty() {
        return (Vec::new(), rest);
    }
    let word = word.to_owned();
    if let Some(below) = rest.strip_prefix("::")
        && below.starts_with(|c: char| c.is_alphabetic() || c == '{' || c == '_')
    {
        let (mut paths, rest) = paths_at(below);
        if paths.is_empty() {
            paths.push(Vec::new());
        }
        paths
            .iter_mut()
            .for_each(|path| path.insert(0, word.clone()));
        return (paths, rest);
    }
    (vec![vec![word]], rest)
}

/// The modules of a folder.
struct Modules {
    /// The code of each, by path.
    code: BTreeMap<Vec<String>, String>,
    /// What each module calls by a name of its own: the path to it, by module and name.
    uses: BTreeMap<(Vec<String>, String), Vec<String>>,
}

impl Modules {
    fn of(folder: &Path) -> Self {
        let code = modules(folder);
        let mut uses = BTreeMap::new();
        for (module, text) in &code {
            for (at, start) in text.match_indices("use ") {
                if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                    continue;
                }
                for path in paths_at(&text[at + start.len()..]).0 {
                    let name = path.last().unwrap().clone();
                    let mut full = absolute(module, path);
                    // A path that begins with a name begins in this module, if the name is that of a child.
                    let child = [module.as_slice(), &full[..1.min(full.len())]].concat();
                    if code.contains_key(&child) && child.len() > module.len() {
                        full = [module.as_slice(), &full].concat();
                    }
                    uses.insert((module.clone(), name), full);
                }
            }
        }
        Self { code, uses }
    }

    /// Returns the module in which something is, also if it is named as part of a module that only re-exports it.
    fn home_of(&self, path: &[String]) -> Vec<String> {
        let mut path = path.to_vec();
        // Each step goes through one re-export.
        for _ in 0..8 {
            let known = |len: &usize| self.code.contains_key(&path[..*len]);
            let len = (1..=path.len()).rev().find(known).unwrap_or(0);
            let (module, rest) = path.split_at(len);
            let used = rest.first().map(|name| (module.to_vec(), name.clone()));
            match used.and_then(|used| self.uses.get(&used)) {
                Some(full) if *full != path => path = [full, &rest[1..]].concat(),
                _ => return module.to_vec(),
            }
        }
        panic!("{path:?} is re-exported in a circle")
    }

    /// Returns the modules that a module names.
    fn named_by(&self, module: &[String]) -> BTreeSet<Vec<String>> {
        let code = &self.code[module];
        let mut named = BTreeSet::new();
        for start in ["crate::", "super::", "self::"] {
            for (at, _) in code.match_indices(start) {
                let before = code[..at].chars().next_back();
                if before.is_some_and(|c| c.is_alphanumeric() || c == ':' || c == '_') {
                    continue;
                }
                let paths = paths_at(&code[at..]).0.into_iter();
                named.extend(paths.map(|path| self.home_of(&absolute(module, path))));
            }
        }
        named
    }
}

/// The path from the root to what a module names by this path. A path that begins with another name stays as it is.
fn absolute(module: &[String], path: Vec<String>) -> Vec<String> {
    let mut full = match path[0].as_str() {
        "super" | "self" => module.to_vec(),
        _ => Vec::new(),
    };
    for word in path {
        match word.as_str() {
            "crate" | "self" => {}
            "super" => drop(full.pop()),
            _ => full.push(word),
        }
    }
    full
}

#[test]
fn folders_of_the_cluster_point_one_way() {
    crate::enter_project();
    let modules = Modules::of(Path::new("src"));
    for (folder, allowed) in CLUSTER {
        let inside = ["cluster".to_owned(), (*folder).to_owned()];
        let files = modules.code.keys().filter(|m| m.starts_with(&inside));
        let files = files.filter(|m| m.last().is_some_and(|name| name != "tests"));
        let mut found = 0;
        for file in files {
            found += 1;
            for used in modules.named_by(file) {
                let fine = used.first().is_none_or(|layer| layer != "cluster")
                    || used
                        .get(1)
                        .is_some_and(|used| used == folder || allowed.contains(&used.as_str()));
                assert!(
                    fine,
                    "{} uses {}, but cluster/{folder} may use only {allowed:?}",
                    file.join("::"),
                    used.join("::")
                );
            }
        }
        assert!(found > 2, "src/cluster/{folder} has only {found} files");
    }
}

/// Files that import each other cannot be read or changed one at a time.
#[test]
fn imports_have_no_cycles() {
    crate::enter_project();
    let edges = check_cycles(Path::new("src")) + check_cycles(Path::new("loadtest/src"));
    assert!(
        edges > 200,
        "only {edges} imports were found: the parser of this test misses most of them"
    );
}

/// Returns the number of imports below a folder.
fn check_cycles(folder: &Path) -> usize {
    let modules = Modules::of(folder);
    // Parents and children count as the same module.
    let others = |module: &Vec<String>| {
        let mut named = modules.named_by(module);
        named.retain(|named| !named.starts_with(module) && !module.starts_with(named));
        named
    };
    let mut left: BTreeMap<_, _> = modules
        .code
        .keys()
        .map(|module| (module.clone(), others(module)))
        .collect();
    let edges: usize = left.values().map(BTreeSet::len).sum();
    // A module that imports no remaining module, or that none imports, is in no cycle.
    loop {
        let before = left.len();
        let named: BTreeSet<_> = left.values().flatten().cloned().collect();
        let here: BTreeSet<_> = left.keys().cloned().collect();
        left.retain(|module, names| {
            names.retain(|name| here.contains(name));
            !names.is_empty() && named.contains(module)
        });
        if left.len() == before {
            break;
        }
    }
    let circles: Vec<String> = left
        .iter()
        .map(|(module, names)| {
            let names: Vec<String> = names.iter().map(|name| name.join("::")).collect();
            format!("{} uses {}", module.join("::"), names.join(", "))
        })
        .collect();
    assert!(circles.is_empty(), "import cycles: {circles:#?}");
    edges
}

#[test]
fn files_stay_short() {
    crate::enter_project();
    for (folder, extensions) in CODE {
        let files = files(Path::new(folder), extensions);
        assert!(!files.is_empty(), "{folder} has no files");
        for (file, text) in files {
            let lines = text.lines().count();
            assert!(
                lines <= LINES_MAX,
                "{file} has {lines} lines, more than {LINES_MAX}: split it by idea"
            );
        }
    }
}

/// The metrics that a text counts.
fn metrics_counted(text: &str) -> Vec<String> {
    let calls = ["counter!(", "gauge!(", "histogram!("];
    let calls = calls.into_iter().flat_map(|call| text.split(call).skip(1));
    let names = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next());
    names.map(str::to_owned).collect()
}

#[test]
fn each_metric_has_a_help_text() {
    crate::enter_project();
    let counted: BTreeSet<String> = modules(Path::new("src"))
        .values()
        .flat_map(|code| metrics_counted(code))
        .collect();
    assert!(
        counted.len() > 50,
        "only {} metrics were found",
        counted.len()
    );
    let help = fs::read_to_string("src/telemetry/help.rs").unwrap();
    let listed: Vec<String> = help
        .split('"')
        .filter(|part| part.starts_with("chat_"))
        .map(str::to_owned)
        .collect();
    let described: BTreeSet<String> = listed.iter().cloned().collect();
    assert_eq!(
        listed.len(),
        described.len(),
        "src/telemetry/help.rs lists a metric twice"
    );
    assert_eq!(
        counted, described,
        "src/telemetry/help.rs must list each metric that is counted, and no other"
    );
}

#[test]
fn each_counter_with_labels_is_listed_as_such() {
    crate::enter_project();
    let calls = |text: &str| -> Vec<(String, bool)> {
        let calls = text.split("counter!(").skip(1);
        let named = calls.filter_map(|call| {
            let (name, after) = call.trim_start().strip_prefix('"')?.split_once('"')?;
            Some((name.to_owned(), after.trim_start().starts_with(',')))
        });
        named.collect()
    };
    let modules = modules(Path::new("src"));
    let counted: Vec<_> = modules.values().flat_map(|code| calls(code)).collect();
    let of = |labelled: bool| -> BTreeSet<&str> {
        let of = counted.iter().filter(|(_, is)| *is == labelled);
        of.map(|(name, _)| name.as_str()).collect()
    };
    let (labelled, plain) = (of(true), of(false));
    assert!(labelled.len() >= 9, "only {labelled:?} were found");
    let telemetry = fs::read_to_string("src/telemetry.rs").unwrap();
    let list = telemetry.split("const LABELLED").nth(1).unwrap();
    let list = list.split("];").next().unwrap();
    let listed: BTreeSet<&str> = list.split('"').filter(|p| p.starts_with("chat_")).collect();
    assert_eq!(
        labelled, listed,
        "LABELLED in src/telemetry.rs must have each counter with labels, and no other"
    );
    let both: Vec<_> = labelled.intersection(&plain).collect();
    assert!(both.is_empty(), "counted with and without labels: {both:?}");
}

/// The files that ARCHITECTURE.md calls pure.
fn pure_files() -> Vec<PathBuf> {
    let text = fs::read_to_string("ARCHITECTURE.md").unwrap();
    let (mut folder, mut pure) = (PathBuf::new(), Vec::new());
    for line in text.lines() {
        if let Some(title) = line.strip_prefix('#') {
            folder = title.split('`').nth(1).unwrap_or_default().into();
        }
        let row = line.strip_suffix(" |").and_then(|row| row.rsplit_once('|'));
        let is_pure = |content: &str| {
            let mut parts = content.split("; ").map(str::trim);
            parts.any(|part| part == "pure" || part.starts_with("pure,"))
        };
        let Some((names, _)) = row.filter(|(_, content)| is_pure(content)) else {
            continue;
        };
        // A file may be named as seen from the one before it.
        let mut near = folder.clone();
        for name in names.split('`').skip(1).step_by(2) {
            let places = [folder.join(name), near.join(name)];
            let file = places.into_iter().find(|place| place.exists());
            let file = file.unwrap_or_else(|| panic!("{name}: there is no such file: {line}"));
            near = file.parent().unwrap().to_owned();
            pure.push(file);
        }
    }
    pure
}

#[test]
fn pure_files_neither_await_nor_read_a_clock() {
    crate::enter_project();
    let pure = pure_files();
    assert!(
        pure.len() >= 17,
        "ARCHITECTURE.md calls only these pure: {pure:?}"
    );
    for file in pure {
        let text = fs::read_to_string(&file).unwrap();
        let rules = text.split("#[cfg(test)]").next().unwrap();
        for word in [
            "async ",
            ".await",
            "Instant::now",
            "SystemTime::now",
            "clock::wall",
        ] {
            assert!(
                !rules.contains(word),
                "{} contains {word:?}; a pure file neither awaits nor reads a clock",
                file.display()
            );
        }
    }
}

#[test]
fn each_rule_of_the_log_is_tagged_at_the_line_that_keeps_it() {
    crate::enter_project();
    let code: String = sources(Path::new("src/chat"))
        .into_iter()
        .map(|(_, text)| text)
        .collect();
    let storage = fs::read_to_string("docs/storage.md").unwrap();
    for rule in [
        "lease",
        "epoch",
        "epoch-above",
        "settle",
        "prefix",
        "chain",
        "repeat",
        "order",
        "sends-epoch",
        "settle-sends",
        "rank-above",
        "rank-reserved",
        "filled",
        "lost-reset",
    ] {
        let tag = format!("Rule [{rule}]");
        assert_eq!(
            code.matches(&tag).count(),
            1,
            "{tag} must be in src/chat exactly once"
        );
        assert!(
            storage.contains(&format!("[{rule}]")),
            "docs/storage.md must explain [{rule}]"
        );
    }
}

#[test]
fn the_example_configuration_shows_every_setting_with_its_default() {
    use chat_gateway::config::Config;
    crate::enter_project();
    let text = fs::read_to_string("config/gateway.toml").unwrap();
    let example: Config = toml::from_str(&text).unwrap();
    assert_eq!(example, Config::default());
    let table: toml::Table = toml::from_str(&text).unwrap();
    let defaults = toml::Table::try_from(Config::default()).unwrap();
    for (section, settings) in &defaults {
        for (key, value) in settings.as_table().unwrap() {
            let shown = table.get(section).and_then(|s| s.get(key)).is_some();
            assert!(
                shown || value.is_table(),
                "config/gateway.toml lacks {section}.{key}"
            );
        }
    }
}
