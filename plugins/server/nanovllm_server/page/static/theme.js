// Runs before the first paint, so that a chosen theme does not flash the other one.
// Without a stored choice the page follows the system.
"use strict";
try {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that forbids storage shows the system's theme.
}
