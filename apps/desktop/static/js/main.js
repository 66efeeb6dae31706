// Puts the window together and starts it; knows nothing of what its parts do.

import { refreshCatalog } from "./catalog.js";
import { followAddress, refreshList, refreshShown } from "./chats.js";
import { createComposer, focusComposer } from "./composer.js";
import { loadIcons } from "./icons.js";
import { refreshKept } from "./kept.js";
import { connect } from "./live.js";
import { createModels } from "./models.js";
import { createNotices } from "./notices.js";
import { createPanel } from "./panel.js";
import { enableShortcuts } from "./shortcuts.js";
import { createSidebar } from "./sidebar.js";
import { createThread } from "./thread.js";
import { createTopbar } from "./topbar.js";

loadIcons();
createSidebar();
createTopbar();
createThread();
createComposer();
createNotices();
createPanel();
createModels();
enableShortcuts();
window.addEventListener("hashchange", followAddress);
connect(
  () => {
    refreshList();
    refreshKept();
    refreshShown();
    refreshCatalog();
  },
  { conversations: refreshList, kept: refreshKept },
);
focusComposer();
