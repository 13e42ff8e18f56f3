//! Time that passes only when nobody has anything to do.

use chat_gateway::clock;

/// Runs a simulation with paused time and a wall clock of its own. With `SIM_LOG=1` it prints its log.
pub(crate) fn paused<T>(seed: u64, run: impl Future<Output = T>) -> T {
    if std::env::var("SIM_LOG").is_ok() {
        let _ = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .try_init();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        clock::simulate(seed);
        run.await
    })
}
