/**
 * Chromium under a POSIX locale names its language "en-US@posix", which Intl refuses; uPlot asks Intl as it loads.
 * Imported before uPlot.
 */

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
