//! The sources of the settings: the file, and the environment above it.

use std::{collections::BTreeMap, ffi::OsString, fs, path::Path};

use serde::Deserialize as _;
use serde_json::Value as Json;

use super::{
    Config, Error,
    input::{Content, Input, Node, Section, Wrong, shown},
};

/// Variables of the environment that begin with this are settings.
const PREFIX: &str = "CHAT__";
/// Variables that begin with this are probably meant as settings if their words are those of one.
const MISSPELT_PREFIX: &str = "CHAT_";
/// The only setting whose keys the operator chooses: names of datacenters, which differ in case.
const FREE: &str = "store.cassandra.replication";
/// The key of it that is no datacenter.
const EVERYWHERE: &str = "replication_factor";

/// All settings that are not defaults.
#[derive(Default)]
pub(super) struct Sources {
    root: Section,
    /// Names of variables that begin with `CHAT_` and are not settings.
    pub(super) ignored: Vec<String>,
}

/// A setting that cannot be used, by its name, and a text for the operator.
pub(super) struct Refused {
    pub(super) key: String,
    pub(super) text: String,
}

impl Refused {
    fn new(key: String, origin: &str, text: &str) -> Self {
        let text = format!("{key} ({origin}): {text}");
        Self { key, text }
    }
}

impl Sources {
    /// Reads a file. The error never has a line of it, which might contain a secret.
    pub(super) fn read_file(&mut self, path: &Path) -> Result<(), Error> {
        let failed = |reason: String| Error::File(path.to_owned(), reason);
        let text = fs::read(path).map_err(|e| failed(e.to_string()))?;
        let text = String::from_utf8(text).map_err(|_| failed("it is not UTF-8".into()))?;
        let table: toml::Table = toml::from_str(&text).map_err(|e| {
            let before = text.get(..e.span().unwrap_or_default().start);
            let before = before.unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
            let text = without_values(e.message());
            failed(format!("line {line}, column {column}: {text}"))
        })?;
        let origin = path.display().to_string();
        self.root = section(table, &origin);
        Ok(())
    }

    /// Reads the variables of the environment that are settings, and returns those that cannot be read.
    pub(super) fn read_environment(
        &mut self,
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Vec<Refused> {
        let names = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value));
        // In the order of their names, so that a section comes before its settings.
        let variables: BTreeMap<_, _> = variables.filter_map(names).collect();
        let mut refused = Vec::new();
        for (name, value) in variables {
            let upper = name.to_ascii_uppercase();
            if upper.starts_with(PREFIX) {
                let path = path_of(&name[PREFIX.len()..]);
                let key = path.iter().map(|name| shown(name));
                let key = key.collect::<Vec<_>>().join(".");
                let origin = match key.starts_with(FREE) {
                    true => format!("environment {name}"),
                    false => format!("environment {upper}"),
                };
                match value.into_string() {
                    Ok(text) => self.root.set(&path, &origin, text),
                    Err(_) => {
                        refused.push(Refused::new(key, &origin, "must be UTF-8"));
                    }
                }
            } else if let Some(words) = upper.strip_prefix(MISSPELT_PREFIX) {
                match meant(words) {
                    Some(key) => refused.push(Refused {
                        text: format!("{name}: is not read. Write {}", variable(&key)),
                        key,
                    }),
                    None => self.ignored.push(name),
                }
            }
        }
        refused
    }

    /// Returns the source of a setting.
    pub(super) fn origin(&self, key: &str) -> &str {
        let key = key.split('[').next().unwrap_or(key);
        let mut section = &self.root;
        let mut origin = "default";
        for part in key.split('.') {
            let Some(node) = section.0.get(part) else {
                return "default";
            };
            origin = &node.origin;
            match &node.content {
                Content::Section(below) => section = below,
                Content::Text(_) | Content::Toml(_) => break,
            }
        }
        origin
    }

    /// Takes out each setting that is unknown or has a wrong type, and returns all of them.
    pub(super) fn take_wrong(&mut self) -> Vec<Refused> {
        let known = known();
        let mut paths = Vec::new();
        self.root.paths(&mut Vec::new(), &mut paths);
        let mut refused = Vec::new();
        for path in paths {
            let Some(node) = self.root.get(&path) else {
                continue;
            };
            let wrong = wrong_at(&path, node, &known);
            if !wrong.is_empty() {
                refused.extend(wrong);
                self.root.remove(&path);
            }
        }
        refused
    }

    /// Returns the settings, all others with their defaults.
    pub(super) fn config(&self) -> Result<Config, Wrong> {
        Config::deserialize(Input::Section(&self.root))
    }
}

impl Section {
    fn set(&mut self, path: &[String], origin: &str, text: String) {
        let [name, below @ ..] = path else {
            return;
        };
        let node = self.0.entry(name.clone()).or_insert_with(|| Node {
            origin: origin.to_owned(),
            content: Content::Section(Self::default()),
        });
        if below.is_empty() {
            node.origin = origin.to_owned();
            node.content = Content::Text(text);
            return;
        }
        if !matches!(node.content, Content::Section(_)) {
            node.origin = origin.to_owned();
            node.content = Content::Section(Self::default());
        }
        if let Content::Section(section) = &mut node.content {
            section.set(below, origin, text);
        }
    }

    fn get(&self, path: &[String]) -> Option<&Node> {
        let [name, below @ ..] = path else {
            return None;
        };
        let node = self.0.get(name)?;
        match &node.content {
            Content::Section(section) if !below.is_empty() => section.get(below),
            _ => Some(node),
        }
    }

    /// Removes a setting, and the sections that become empty.
    fn remove(&mut self, path: &[String]) {
        let [name, below @ ..] = path else {
            return;
        };
        if let Some(Content::Section(section)) = self.0.get_mut(name).map(|node| &mut node.content)
            && !below.is_empty()
        {
            section.remove(below);
            if !section.0.is_empty() {
                return;
            }
        }
        self.0.remove(name);
    }

    /// Collects the paths of all settings. An empty section counts as one, because it may be where a value is wanted.
    fn paths(&self, above: &mut Vec<String>, paths: &mut Vec<Vec<String>>) {
        for (name, node) in &self.0 {
            above.push(name.clone());
            match &node.content {
                Content::Section(section) if !section.0.is_empty() => section.paths(above, paths),
                _ => paths.push(above.clone()),
            }
            above.pop();
        }
    }
}

/// Returns the text of an error in TOML, unless it quotes more than punctuation: that could be a secret.
fn without_values(text: &str) -> &str {
    let mut quoted = text.split('`').skip(1).step_by(2);
    if quoted.any(|part| part.contains(char::is_alphanumeric)) {
        return "this is not TOML";
    }
    text
}

/// Returns the path of the setting that a variable names. Names of settings have no upper case, and keys that the operator
/// chooses are as they are.
fn path_of(variable: &str) -> Vec<String> {
    let mut path: Vec<String> = Vec::new();
    for part in variable.splitn(FREE.split('.').count() + 1, "__") {
        let lower = part.to_ascii_lowercase();
        let is_free = path.join(".") == FREE && lower != EVERYWHERE;
        path.push(if is_free { part.to_owned() } else { lower });
    }
    path
}

fn section(table: toml::Table, origin: &str) -> Section {
    let node = |value| Node {
        origin: origin.to_owned(),
        content: match value {
            toml::Value::Table(table) => Content::Section(section(table, origin)),
            other => Content::Toml(other),
        },
    };
    let nodes = table.into_iter().map(|(key, value)| (key, node(value)));
    Section(nodes.collect())
}

/// Returns what is wrong with one setting: it is unknown, or has another type. Each setting is read alone, with defaults for
/// all others, so that all wrong ones are found.
fn wrong_at(path: &[String], node: &Node, known: &Json) -> Vec<Refused> {
    let key = path.join(".");
    if !is_known(path, known) {
        let from_environment = node.origin.starts_with("environment ");
        let nearest = nearest(&key, 1 + key.len() / 3).map(|near| {
            if from_environment {
                variable(&near)
            } else {
                near
            }
        });
        let text = match nearest {
            Some(near) => format!("there is no such setting; the nearest is {near}"),
            None => "there is no such setting; config/gateway.toml has all of them".into(),
        };
        let names: Vec<_> = path.iter().map(|name| shown(name)).collect();
        // The name of a variable has the key too.
        let origin: &str = match from_environment && names != path {
            true => "environment",
            false => &node.origin,
        };
        return vec![Refused::new(names.join("."), origin, &text)];
    }
    let read = |node: Node| {
        let mut alone = node;
        for name in path.iter().rev() {
            alone = Node {
                origin: String::new(),
                content: Content::Section(Section([(name.clone(), alone)].into())),
            };
        }
        match alone.content {
            Content::Section(root) => Config::deserialize(Input::Section(&root)).err(),
            Content::Text(_) | Content::Toml(_) => Some(Wrong::new("must have a name")),
        }
    };
    let refused = |wrong: Wrong| Refused::new(wrong.key, &node.origin, &wrong.text);
    // Each table of a list is read alone, because a read reports only its first error.
    if let Content::Toml(toml::Value::Array(items)) = &node.content
        && items.iter().any(toml::Value::is_table)
    {
        let each = items.iter().enumerate().filter_map(|(i, item)| {
            let mut wrong = read(Node {
                origin: String::new(),
                content: Content::Toml(toml::Value::Array(vec![item.clone()])),
            })?;
            wrong.key = wrong.key.replacen("[0]", &format!("[{i}]"), 1);
            Some(wrong)
        });
        return each.map(refused).collect();
    }
    read(node.clone()).map(refused).into_iter().collect()
}

/// Returns the defaults of all settings. Settings without a default are null.
fn known() -> Json {
    let mut known = serde_json::to_value(Config::default()).unwrap_or_default();
    if let Some(sections) = known.as_object_mut() {
        // Without webhooks they are left out.
        sections.insert("webhooks".into(), Json::Null);
    }
    known
}

fn is_known(path: &[String], known: &Json) -> bool {
    let mut at = known;
    for (i, name) in path.iter().enumerate() {
        match at {
            Json::Object(_) if path[..i].join(".") == FREE => return true,
            Json::Object(section) => match section.get(name) {
                Some(below) => at = below,
                None => return false,
            },
            // Settings below a setting: its type is wrong, which is said later.
            _ => return true,
        }
    }
    true
}

/// Returns the names of all settings.
fn names() -> Vec<String> {
    fn add(above: &str, at: &Json, names: &mut Vec<String>) {
        match at {
            Json::Object(section) if above != FREE => {
                for (name, below) in section {
                    let dot = if above.is_empty() { "" } else { "." };
                    add(&format!("{above}{dot}{name}"), below, names);
                }
            }
            _ => names.push(above.to_owned()),
        }
    }
    let mut names = Vec::new();
    add("", &known(), &mut names);
    names
}

/// Returns the setting whose name is nearest, if it differs in at most so many letters.
fn nearest(key: &str, differences: usize) -> Option<String> {
    let plain = |name: &str| name.replace(['.', '_'], " ");
    let distance = |name: &String| strsim::osa_distance(&plain(name), &plain(key));
    let names = names().into_iter();
    let near = names.min_by_key(distance)?;
    (distance(&near) <= differences).then_some(near)
}

/// Returns the setting that a variable without the two underscores of [`PREFIX`] was meant to be.
fn meant(words: &str) -> Option<String> {
    let words: Vec<_> = words.split('_').filter(|word| !word.is_empty()).collect();
    nearest(&words.join("_").to_lowercase(), 1)
}

/// Returns the name of a setting in the environment.
fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.to_uppercase().replace('.', "__"))
}
