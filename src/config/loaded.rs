//! The sources of the settings, and how they are shown.

use serde_json::Value;

use super::Loaded;

impl Loaded {
    /// Returns the source of a setting: the file, the environment, or the defaults.
    pub(super) fn origin(&self, key: &str) -> &str {
        self.sources.origin(key)
    }

    /// Returns the names of variables of the environment that look like settings and are not.
    #[must_use]
    pub fn ignored_variables(&self) -> &[String] {
        &self.sources.ignored
    }

    /// Returns all settings with their values and sources. Secrets are hidden.
    #[must_use]
    pub fn show(&self) -> String {
        let mut lines = Vec::new();
        if let Ok(value) = serde_json::to_value(&self.config) {
            self.show_value("", &value, &mut lines);
        }
        lines.join("\n")
    }

    fn show_value(&self, key: &str, value: &Value, lines: &mut Vec<String>) {
        match value {
            Value::Object(dict) => {
                for (name, value) in dict {
                    let key = if key.is_empty() {
                        name.clone()
                    } else {
                        format!("{key}.{name}")
                    };
                    self.show_value(&key, value, lines);
                }
            }
            Value::Array(items) if items.iter().any(Value::is_object) => {
                for (i, item) in items.iter().enumerate() {
                    self.show_value(&format!("{key}[{i}]"), item, lines);
                }
            }
            Value::Null => {}
            value => {
                let text = match value {
                    // The path of a webhook's address may be secret too.
                    _ if key.starts_with("webhooks[") && key.ends_with(".url") => {
                        "\"***\"".to_owned()
                    }
                    _ if ["secret", "secrets", "password", "secret_key"]
                        .iter()
                        .any(|end| key.ends_with(end)) =>
                    {
                        "\"***\"".to_owned()
                    }
                    other => serde_json::to_string(other).unwrap_or_default(),
                };
                lines.push(format!("{key} = {text}    # {}", self.origin(key)));
            }
        }
    }
}
