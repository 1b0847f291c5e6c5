-- Keystroke for Neovim 0.10 and newer: starts the language server and adds what Neovim's LSP client lacks.
--
-- This file has settings, keys and the client; ghost text is in ghost.lua, next edits in next_edit.lua, tasks in
-- tasks.lua, the status in status.lua.

local M = {}

M.defaults = {
  cmd = { 'keystroke', 'lsp' },
  filetypes = nil, -- a list; nil: every file with a file type
  exclude = { 'help', 'TelescopePrompt', 'gitcommit', 'NvimTree', 'neo-tree' },
  root_markers = { '.git', 'pyproject.toml', 'package.json', 'go.mod', 'Cargo.toml' },
  ghost_text = true,
  next_edit = true,
  keys = { -- false: none
    accept = '<Tab>',
    accept_word = '<C-Right>',
    accept_line = '<C-Down>',
    dismiss = '<C-]>',
    next_edit = '<M-n>',
  },
}
M.config = vim.deepcopy(M.defaults)
M.ready = false

local function module(name)
  return require('keystroke.' .. name)
end

--- The server's client, if it runs for this buffer (default: the current one).
function M.client(buffer)
  local find = vim.lsp.get_clients or vim.lsp.get_active_clients
  return find({ name = 'keystroke', bufnr = buffer or vim.api.nvim_get_current_buf() })[1]
end

--- Send a request; the reply goes to `done(error, result)`. Returns the request's id, or nil without a server.
function M.request(buffer, method, params, done)
  local client = M.client(buffer)
  if not client then
    return nil
  end
  local function heard(problem, result)
    done(problem, result)
  end
  local sent, id
  if vim.fn.has('nvim-0.11') == 1 then
    sent, id = client:request(method, params, heard, buffer)
  else
    sent, id = client.request(method, params, heard, buffer)
  end
  return sent and id or nil
end

function M.notify(buffer, method, params)
  local client = M.client(buffer)
  if client then
    if vim.fn.has('nvim-0.11') == 1 then
      client:notify(method, params)
    else
      client.notify(method, params)
    end
  end
end

function M.cancel(buffer, id)
  local client = id and M.client(buffer)
  if client then
    if vim.fn.has('nvim-0.11') == 1 then
      client:cancel_request(id)
    else
      client.cancel_request(id)
    end
  end
end

--- Run one of the server's commands.
function M.run(buffer, command, arguments, done)
  local sent = M.request(buffer, 'workspace/executeCommand', { command = command, arguments = arguments }, function(problem, result)
    if problem then
      vim.notify('Keystroke: ' .. (problem.message or tostring(problem)), vim.log.levels.WARN)
    elseif done then
      done(result)
    end
  end)
  if not sent then
    vim.notify('Keystroke: the language server is not running for this buffer; see :checkhealth keystroke', vim.log.levels.WARN)
  end
end

local function wanted(buffer)
  if vim.bo[buffer].buftype ~= '' or not vim.bo[buffer].modifiable then
    return false
  end
  local kind = vim.bo[buffer].filetype
  if M.config.filetypes then
    return vim.tbl_contains(M.config.filetypes, kind)
  end
  return kind ~= '' and not vim.tbl_contains(M.config.exclude, kind)
end

local function capabilities()
  local known = vim.lsp.protocol.make_client_capabilities()
  known.general = known.general or {}
  known.general.positionEncodings = { 'utf-8' } -- Neovim counts columns in bytes
  known.textDocument.inlineCompletion = { dynamicRegistration = false }
  known.experimental = vim.tbl_extend('force', known.experimental or {}, { keystrokeTasks = true })
  return known
end

function M.start(buffer)
  if not wanted(buffer) or vim.fn.executable(M.config.cmd[1]) == 0 then
    return
  end
  local name = vim.api.nvim_buf_get_name(buffer)
  local found = vim.fs.find(M.config.root_markers, { upward = true, path = vim.fs.dirname(name) })[1]
  local root = found and vim.fs.dirname(found) or (name ~= '' and vim.fs.dirname(name) or vim.fn.getcwd())
  vim.lsp.start({
    name = 'keystroke',
    cmd = M.config.cmd,
    root_dir = root,
    workspace_folders = { { uri = vim.uri_from_fname(root), name = root } },
    capabilities = capabilities(),
    handlers = {
      -- A larger model revised the suggestion: request it again, and the server answers at once.
      ['keystroke/suggestionRevised'] = function(_, told)
        module('ghost').revised(told.uri)
      end,
      ['keystroke/task'] = function(_, event)
        module('tasks').told(event)
      end,
    },
  }, { bufnr = buffer })
end

--- The previous mapping of a key, used when there is no suggestion.
local function before(mode, key)
  local known = vim.fn.maparg(key, mode, false, true)
  return function()
    if known.callback then
      local keys = known.callback()
      return known.expr == 1 and keys or ''
    elseif known.rhs and known.rhs ~= '' then
      return known.expr == 1 and vim.api.nvim_eval(known.rhs) or known.rhs
    end
    return key
  end
end

local function bind()
  local ghost = module('ghost')
  local function takes(name, does)
    local key = M.config.keys[name]
    if key then
      local otherwise = before('i', key)
      vim.keymap.set('i', key, function()
        if ghost.visible() then
          vim.schedule(does) -- an expression mapping may not change the text
          return ''
        end
        return otherwise()
      end, { expr = true, desc = 'Keystroke: ' .. name:gsub('_', ' ') })
    end
  end
  takes('accept', function() ghost.accept('all') end)
  takes('accept_word', function() ghost.accept('word') end)
  takes('accept_line', function() ghost.accept('line') end)
  takes('dismiss', ghost.clear)
  if M.config.keys.next_edit then
    vim.keymap.set({ 'n', 'i' }, M.config.keys.next_edit, M.next_edit, { desc = 'Keystroke: next edit' })
  end
end

--- Configure and start; `options` as in the defaults above. May be called again.
function M.setup(options)
  if vim.fn.has('nvim-0.10') == 0 then
    vim.notify('Keystroke requires Neovim 0.10 or newer; see docs/editors/vim.md for older versions', vim.log.levels.ERROR)
    return
  end
  M.config = vim.tbl_deep_extend('force', vim.deepcopy(M.defaults), options or {})
  local group = vim.api.nvim_create_augroup('keystroke', {})
  local function on(events, does)
    vim.api.nvim_create_autocmd(events, { group = group, callback = does })
  end
  on('FileType', function(event) M.start(event.buf) end)
  on('TextChangedI', function(event)
    module('ghost').typed(event.buf)
    module('next_edit').changed(event.buf)
  end)
  on('TextChanged', function(event) module('next_edit').changed(event.buf) end)
  on('CursorMovedI', function() module('ghost').moved() end)
  on({ 'InsertLeave', 'BufLeave', 'CompleteChanged' }, function() module('ghost').clear() end)
  vim.api.nvim_set_hl(0, 'KeystrokeGhost', { default = true, link = 'NonText' })
  vim.api.nvim_set_hl(0, 'KeystrokeNew', { default = true, link = 'DiffAdd' })
  vim.api.nvim_set_hl(0, 'KeystrokeOld', { default = true, link = 'DiffDelete' })
  if not M.ready then
    bind()
  end
  M.ready = true
  for _, buffer in ipairs(vim.api.nvim_list_bufs()) do
    if vim.api.nvim_buf_is_loaded(buffer) then
      M.start(buffer)
    end
  end
end

-- Functions for commands and mappings.

function M.accept(part) return module('ghost').accept(part or 'all') end
function M.next_edit() module('next_edit').take() end
function M.status() return module('status').text() end

function M.toggle()
  M.config.ghost_text = not M.config.ghost_text
  module('ghost').clear()
  vim.notify('Keystroke: ghost text is ' .. (M.config.ghost_text and 'on' or 'off'))
end

function M.reconnect() M.run(vim.api.nvim_get_current_buf(), 'keystroke.reconnect', {}) end

local function asked(words, prompt, does)
  if words and words:match('%S') then
    does(words)
  else
    vim.ui.input({ prompt = prompt }, function(line)
      if line and line:match('%S') then
        does(line)
      end
    end)
  end
end

--- Edit lines `range` (from 1, inclusive; nil: the file) by instruction.
function M.edit(words, range)
  local buffer = vim.api.nvim_get_current_buf()
  asked(words, 'Instruction: ', function(instruction)
    local place = vim.NIL
    if range then
      local last = vim.api.nvim_buf_get_lines(buffer, range[2] - 1, range[2], false)[1] or ''
      place = { start = { line = range[1] - 1, character = 0 }, ['end'] = { line = range[2] - 1, character = #last } }
    end
    M.run(buffer, 'keystroke.edit', { vim.uri_from_bufnr(buffer), place, instruction })
  end)
end

function M.task(words)
  local buffer = vim.api.nvim_get_current_buf()
  asked(words, 'Task for this folder: ', function(instruction)
    M.run(buffer, 'keystroke.task', { instruction }, function(task) module('tasks').begun(task) end)
  end)
end

function M.tasks() module('tasks').open() end

return M
