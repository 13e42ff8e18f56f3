//! The rules that a bucket of uploaded files needs, as JSON for `aws s3api`.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::config::{Config, FilesKind};

#[derive(Subcommand)]
pub(super) enum Command {
    /// Print the rule that lets pages use the bucket, as `aws s3api put-bucket-cors --cors-configuration` takes it
    Cors,
    /// Print the rule that removes uploads nobody completes, as `aws s3api put-bucket-lifecycle-configuration
    /// --lifecycle-configuration` takes it
    Lifecycle,
}

pub(super) fn print(config: &Config, command: &Command) -> anyhow::Result<ExitCode> {
    let rules = match command {
        Command::Cors => cors(config)?,
        Command::Lifecycle => lifecycle(config)?,
    };
    println!("{rules:#}");
    Ok(ExitCode::SUCCESS)
}

/// Returns the rule by which pages of `client.origins` may use the bucket.
fn cors(config: &Config) -> anyhow::Result<Value> {
    prefix(config)?;
    let origins = &config.client.origins;
    if origins.is_empty() {
        bail!(
            "client.origins: name the origins of the pages that upload, also the gateway's own, such as \
             https://chat.example.org"
        );
    }
    Ok(json!({"CORSRules": [{
        "AllowedOrigins": origins,
        "AllowedMethods": ["GET", "PUT", "HEAD"],
        "AllowedHeaders": ["*"],
        "ExposeHeaders": ["ETag", "Content-Range"],
        "MaxAgeSeconds": 3_600,
    }]}))
}

/// Returns the rule by which the bucket removes uploads that nobody completes.
fn lifecycle(config: &Config) -> anyhow::Result<Value> {
    let prefix = format!("{}incoming/", prefix(config)?);
    // A day more than uploads may take.
    let days = config.attachments.orphan_h.div_ceil(24) + 1;
    Ok(json!({"Rules": [{
        "ID": "chat-gateway: uploads that nobody completes",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
        "Expiration": {"Days": days},
    }]}))
}

fn prefix(config: &Config) -> anyhow::Result<&str> {
    let of = &config.attachments;
    (of.store == FilesKind::S3)
        .then_some(of.s3.prefix.as_str())
        .context("attachments.store: only \"s3\" has a bucket")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_for_the_bucket_of_the_settings() {
        let mut config = Config::default();
        assert!(cors(&config).is_err() && lifecycle(&config).is_err());
        config.attachments.store = FilesKind::S3;
        config.attachments.s3.prefix = "chat/".into();
        assert!(cors(&config).is_err(), "without an origin it is useless");
        config.client.origins = vec!["https://chat.example.org".into()];
        let rule = &cors(&config).unwrap()["CORSRules"][0];
        assert_eq!(rule["AllowedOrigins"][0], "https://chat.example.org");
        let rule = &lifecycle(&config).unwrap()["Rules"][0];
        assert_eq!(rule["Filter"]["Prefix"], "chat/incoming/");
        assert_eq!(rule["Expiration"]["Days"], 2);
    }
}
