//! Plots for the report: values over time, latency by percentile, and growth.

use plotters::{prelude::*, style::FontDesc};

const SIZE: (u32, u32) = (640, 340);

/// Colours that are distinct on white, also for colour-blind people (Okabe and Ito, 2008).
const COLOURS: [(u8, u8, u8); 7] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (230, 159, 0),
    (60, 60, 60),
];

pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Escapes text for HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// The horizontal axis of a plot.
pub(crate) enum Axis {
    Seconds,
    /// Percentiles on a scale of nines: 0, 90, 99, 99.9 have equal distances.
    Percentiles,
    /// Powers of ten of a quantity with this name.
    Powers(&'static str),
}

impl Axis {
    /// Draws lines over this axis, as SVG.
    pub(crate) fn draw(&self, unit: &str, lines: &[Line]) -> anyhow::Result<String> {
        const NINES_MAX: f64 = 5.0;
        match self {
            Self::Seconds => draw(unit, "seconds", lines, |x| x, |x| format!("{x:.0}")),
            Self::Percentiles => {
                let nines = |quantile: f64| (-(1.0 - quantile).log10()).min(NINES_MAX);
                draw(unit, "percentile", lines, nines, |nines| {
                    // Labels: 0, 90, 99, 99.9 …
                    let digits = (nines.round() as usize).saturating_sub(2);
                    whole(
                        nines,
                        format!("{:.digits$}", 100.0 - 100.0 * 10f64.powf(-nines.round())),
                    )
                })
            }
            Self::Powers(of) => draw(unit, of, lines, f64::log10, |power| {
                whole(power, format!("{:.0}", 10f64.powf(power.round())))
            }),
        }
    }
}

/// The label at a whole number, nothing elsewhere.
fn whole(at: f64, label: String) -> String {
    if (at - at.round()).abs() < 0.01 {
        label
    } else {
        String::new()
    }
}

fn draw(
    unit: &str,
    below: &str,
    lines: &[Line],
    place: impl Fn(f64) -> f64,
    label: impl Fn(f64) -> String,
) -> anyhow::Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let points = || lines.iter().flat_map(|line| &line.points);
        let right = points().map(|&(x, _)| place(x)).fold(1.0, f64::max);
        let top = points().map(|&(_, y)| y).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
        let font = || FontDesc::from(("sans-serif", 13));
        let error =
            |e: DrawingAreaErrorKind<_>| anyhow::anyhow!("the plot could not be drawn: {e}");
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(36)
            .y_label_area_size(62)
            .build_cartesian_2d(0.0..right, 0.0..top)
            .map_err(error)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .label_style(font())
            .x_desc(below)
            .y_desc(unit)
            .x_label_formatter(&|x| label(*x))
            .draw()
            .map_err(error)?;
        for (number, line) in lines.iter().enumerate() {
            let (red, green, blue) = COLOURS[number % COLOURS.len()];
            let colour = RGBColor(red, green, blue);
            let placed = line.points.iter().map(|&(x, y)| (place(x), y));
            chart
                .draw_series(LineSeries::new(placed, colour.stroke_width(2)))
                .map_err(error)?
                .label(&line.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .label_font(font())
            .background_style(WHITE.mix(0.85))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()
            .map_err(error)?;
        root.present().map_err(error)?;
    }
    Ok(text)
}
