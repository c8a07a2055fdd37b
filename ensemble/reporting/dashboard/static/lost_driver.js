/** What every view says where the process that drives the run is gone: its figures stand still. */

import { h, setText } from "./dom.js";
import { clock, visible } from "./format.js";

/** The banner: `{ root, update(run) }`. */
export function driverBanner() {
  const root = h("p", { class: "trouble bad", role: "alert", "data-mark": "driver", hidden: true });
  return {
    root,
    update(run) {
      root.hidden = run === null || !run.driver;
      if (root.hidden) return;
      const last = run.started && run.updated ? ` All figures are as of the last event, ${clock(run.updated - run.started)} after the start.` : "";
      setText(root, `${visible(run.driver)}.`.replace(/^./, (first) => first.toUpperCase()).replace(/([.!?])\.$/, "$1") + last);
    },
  };
}
