//! The sources of the settings, and how they are shown.

use super::Loaded;

impl Loaded {
    /// Returns the source of a setting: the file, the environment, or the defaults.
    pub(super) fn origin(&self, key: &str) -> String {
        let key = key.split('[').next().unwrap_or(key);
        let Some(metadata) = self.figment.find_metadata(key) else {
            return "default".into();
        };
        match &metadata.source {
            Some(figment::Source::File(path)) => path.display().to_string(),
            _ if metadata.name.contains("environment") => {
                format!(
                    "environment CHAT__{}",
                    key.to_uppercase().replace('.', "__")
                )
            }
            _ => "default".into(),
        }
    }

    /// Returns all settings with their values and sources. Secrets are hidden.
    #[must_use]
    pub fn show(&self) -> String {
        let value = figment::value::Value::serialize(&self.config);
        let mut lines = Vec::new();
        if let Ok(value) = value {
            self.show_value("", &value, &mut lines);
        }
        lines.join("\n")
    }

    fn show_value(&self, key: &str, value: &figment::value::Value, lines: &mut Vec<String>) {
        use figment::value::Value;
        match value {
            Value::Dict(_, dict) => {
                for (name, value) in dict {
                    let key = if key.is_empty() {
                        name.clone()
                    } else {
                        format!("{key}.{name}")
                    };
                    self.show_value(&key, value, lines);
                }
            }
            Value::Array(_, items) if items.iter().any(|v| matches!(v, Value::Dict(..))) => {
                for (i, item) in items.iter().enumerate() {
                    self.show_value(&format!("{key}[{i}]"), item, lines);
                }
            }
            Value::Empty(..) => {}
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
