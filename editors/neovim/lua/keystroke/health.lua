-- :checkhealth keystroke

local M = {}

--- The server's status: `connected` to a gateway, and its `model`.
function M.told(client)
  local params = { command = 'keystroke.status', arguments = {} }
  local answer
  if vim.fn.has('nvim-0.11') == 1 then
    answer = client:request_sync('workspace/executeCommand', params, 3000)
  else
    answer = client.request_sync('workspace/executeCommand', params, 3000)
  end
  return answer and answer.result or {}
end

function M.check()
  local health = vim.health
  local keystroke = require('keystroke')
  health.start('keystroke')
  if vim.fn.has('nvim-0.10') == 1 then
    health.ok('Neovim ' .. tostring(vim.version()))
  else
    health.error('Neovim 0.10 or newer is required for inline ghost text', 'For older versions see docs/editors/vim.md')
    return
  end
  local program = keystroke.config.cmd[1]
  if vim.fn.executable(program) == 0 then
    health.error(program .. ' is not on the PATH', 'Install Keystroke, or name it: setup({ cmd = { "/path/to/keystroke", "lsp" } })')
    return
  end
  health.ok(vim.trim(vim.fn.system({ program, '--version' })) .. ' (' .. vim.fn.exepath(program) .. ')')
  if keystroke.ready then
    health.ok('setup() was called')
  else
    health.warn("setup() was not called", "require('keystroke').setup()")
  end
  local clients = (vim.lsp.get_clients or vim.lsp.get_active_clients)({ name = 'keystroke' })
  if #clients == 0 then
    health.warn('the language server is not running', 'Open a file; see :messages and :LspLog for errors')
    return
  end
  for _, client in ipairs(clients) do
    local told = M.told(client)
    local where = client.config.root_dir or '?'
    if told.connected then
      health.ok(string.format('connected in %s, model %s', where, told.model ~= '' and told.model or 'not known yet'))
    else
      health.error('no gateway for ' .. where, 'Run :KeystrokeReconnect')
    end
  end
  for name, key in pairs(keystroke.config.keys) do
    if key then
      local bound = vim.fn.maparg(key, name == 'next_edit' and 'n' or 'i', false, true)
      if not (bound.desc or ''):match('^Keystroke') then
        health.warn(string.format('%s (%s) has another mapping', key, name), 'Map require("keystroke").accept() yourself, or choose another key')
      end
    end
  end
end

return M
