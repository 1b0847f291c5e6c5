-- The next edit: marked at its position; one key goes there, and the same key applies it.
--
-- A change of the text discards the offer, and a new one is requested after a pause.

local keystroke = require('keystroke')

local M = {}
local PAUSE = 200 -- milliseconds without a key, in addition to the server's own delay
local space = vim.api.nvim_create_namespace('keystroke_next_edit')
local timer = (vim.uv or vim.loop).new_timer()
local offer -- { buffer, range, text, command }
local waiting

local function erase()
  for _, buffer in ipairs(vim.api.nvim_list_bufs()) do
    vim.api.nvim_buf_clear_namespace(buffer, space, 0, -1)
  end
end

local function mark()
  erase()
  if not offer or not vim.api.nvim_buf_is_loaded(offer.buffer) then
    return
  end
  local from, to = offer.range.start, offer.range['end']
  local first = vim.split(offer.text, '\n', { plain = true })[1]
  pcall(vim.api.nvim_buf_set_extmark, offer.buffer, space, from.line, from.character, {
    end_row = to.line,
    end_col = to.character,
    hl_group = 'KeystrokeOld',
  })
  pcall(vim.api.nvim_buf_set_extmark, offer.buffer, space, to.line, to.character, {
    virt_text = { { first .. (first ~= offer.text and ' …' or ''), 'KeystrokeNew' } },
    virt_text_pos = 'inline',
  })
end

--- The current offer, for tests and for other displays.
function M.offered() return offer end

function M.clear()
  offer = nil
  erase()
end

local function ask(buffer, done)
  if not vim.api.nvim_buf_is_valid(buffer) or vim.api.nvim_get_current_buf() ~= buffer then
    return
  end
  keystroke.cancel(buffer, waiting)
  local place = vim.api.nvim_win_get_cursor(0)
  local tick = vim.api.nvim_buf_get_changedtick(buffer)
  waiting = keystroke.request(buffer, 'textDocument/copilotInlineEdit', {
    textDocument = { uri = vim.uri_from_bufnr(buffer) },
    position = { line = place[1] - 1, character = place[2] },
    context = { triggerKind = 2 },
  }, function(problem, answer)
    local found = not problem and answer and answer.edits and answer.edits[1]
    if found and vim.api.nvim_buf_get_changedtick(buffer) == tick then
      offer = { buffer = vim.uri_to_bufnr(found.textDocument.uri), range = found.range, text = found.text, command = found.command }
      mark()
    end
    if done then
      done()
    end
  end)
end

--- The text of a buffer changed.
function M.changed(buffer)
  M.clear()
  timer:stop()
  if keystroke.config.next_edit and keystroke.client(buffer) then
    timer:start(PAUSE, 0, vim.schedule_wrap(function() ask(buffer) end))
  end
end

local function go_or_make()
  if not offer then
    vim.notify('Keystroke: no next edit')
    return
  end
  local it, from = offer, offer.range.start
  local here = vim.api.nvim_win_get_cursor(0)
  if vim.api.nvim_get_current_buf() ~= it.buffer or here[1] - 1 ~= from.line then
    vim.cmd("normal! m'") -- add the position to the jump list
    vim.api.nvim_win_set_buf(0, it.buffer)
    vim.api.nvim_win_set_cursor(0, { from.line + 1, from.character })
    mark()
    return
  end
  M.clear()
  vim.lsp.util.apply_text_edits({ { range = it.range, newText = it.text } }, it.buffer, 'utf-8')
  if it.command then
    keystroke.run(it.buffer, it.command.command, it.command.arguments)
  end
end

--- Go to the offered edit; there, apply it.
function M.take()
  if offer then
    go_or_make()
  else
    ask(vim.api.nvim_get_current_buf(), go_or_make)
  end
end

return M
